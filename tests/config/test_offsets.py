"""A character of a scalar's value, found in the file: every style and its oddities."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config.offsets import source_index


def locate(text, offset):
    node = yaml.CSafeLoader(text).get_single_node().value[0][1]
    return source_index(text, node.start_mark.index, node.end_mark.index, node.style, node.value, offset), node.value


@pytest.mark.parametrize(
    "text",
    [
        "k: a + @ b",
        "k: 'a + @ b'",
        'k: "a + @ b"',
        "k: 'it''s @'",
        r'k: "q\"\\ @"',
        r'k: "\x41\u0042\U00000043 \t @"',
        r'k: "\x20\u00a0\_\N\L@"',
        'k: "folded \\\n   @"',
        "k: &anchor a @",
        "k: !!str   'a @'",
        "k: a\n  + b\n  + @",
        "k: |\n  a +\n    b + @\n",
        "k: >-\n  a +\n\n  b + @\n",
        "k: |2 # comment\n   a @\n",
        "k: a @ # comment",
        "k:\r\n  a\r\n  @\r\n",
        "k: 'tab\t@'",
    ],
)
def test_finds_the_character(text):
    _, value = locate(text, 0)
    assert value.count("@") == 1
    assert locate(text, value.index("@"))[0] == text.index("@")


def test_end_of_value_is_after_its_last_character():
    text = "k: 'a + '  # b"
    assert locate(text, 4)[0] == text.index("+") + 1
    assert locate(text, 99)[0] == text.index("+") + 1


words = st.lists(st.sampled_from(["a", "+", "(", "é", "😀", "'", '"', "\\", "\t", "9"]), min_size=1, max_size=12)


@given(words, st.sampled_from("'\"|>"), st.data())
@example(["'"], "'", None)
def test_round_trip_through_every_style(parts, style, data):
    """Whatever PyYAML writes, each visible character is found where it stands."""
    value = " ".join(parts) + " z"
    text = yaml.dump({"k": value}, default_style=style, allow_unicode=True, width=20)
    key_end = text.index(":")
    index = value.index(data.draw(st.sampled_from(parts))) if data else 0
    while value[index].isspace():
        index += 1
    node = yaml.CSafeLoader(text).get_single_node().value[0][1]
    assert node.value.rstrip("\n") == value or style in "|>"
    found = source_index(text, node.start_mark.index, node.end_mark.index, node.style, node.value, index)
    assert found > key_end
    character = node.value[index]
    if not character.isspace():
        assert text[found] in (character, "\\")
