"""The files behind re-attachment."""

import os
import stat

import pytest

from gateway.edges.state_store import (
    FORMAT,
    CorruptRecordError,
    RankRecord,
    StateStore,
    StateStoreError,
    ensure_private_dir,
)


def record(**changes) -> RankRecord:
    fields = {
        "format": FORMAT,
        "group": "main",
        "index": 0,
        "engine_index": 4,
        "protocol": "vllm",
        "incarnation": 3,
        "input_address": "ipc:///run/x/in",
        "output_address": "ipc:///run/x/out",
        "is_ready": True,
        "registration": b"\x81\xa1x\xff",
    }
    return RankRecord(**(fields | changes))


@pytest.fixture
def store(tmp_path):
    store = StateStore(tmp_path / "deep" / "state")
    store.open()
    yield store
    store.close()


def test_a_record_comes_back_as_it_was_saved(store):
    assert store.load("main", 0) is None
    store.save(record())
    assert store.load("main", 0) == record()
    store.save(record(incarnation=4, registration=None, input_address=None, output_address=None))
    assert store.load("main", 0).incarnation == 4
    assert store.load("main", 1) is None


def test_files_are_private_and_no_temporary_one_stays(store):
    store.save(record())
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    files = [path for path in store.directory.iterdir() if path.name != "lock"]
    assert len(files) == 1
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600


def test_group_names_that_look_alike_as_file_names_stay_apart(store):
    names = ["a/b", "a.b", "a_b", "x" * 128, "x" * 127]
    for number, name in enumerate(names):
        store.save(record(group=name, incarnation=number))
    assert [store.load(name, 0).incarnation for name in names] == [0, 1, 2, 3, 4]
    assert all(path.parent == store.directory for path in store.directory.rglob("*.json"))


def test_a_write_that_fails_leaves_the_old_record(store, monkeypatch):
    store.save(record())

    def fails(self, target):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.replace", fails)
    with pytest.raises(OSError, match="Input/output"):
        store.save(record(incarnation=9))
    assert store.load("main", 0) == record()


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'{"format": 1}', b"\xff\xfe", b'{"format": 1, "format": 2}', b"x" * (1024 * 1024 + 1)],
)
def test_an_unreadable_record_names_its_file(store, text):
    store.save(record())
    (path,) = store.directory.glob("*.json")
    path.write_bytes(text)
    with pytest.raises(CorruptRecordError, match=path.name):
        store.load("main", 0)


def test_a_link_in_place_of_a_record_is_not_followed(store, tmp_path):
    store.save(record())
    (path,) = store.directory.glob("*.json")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptRecordError):
        store.load("main", 0)


def test_a_record_of_another_format_is_refused(store):
    store.save(record(format=FORMAT + 1))
    with pytest.raises(CorruptRecordError, match="format"):
        store.load("main", 0)


def test_the_lock_names_its_owner_and_is_given_back(store):
    second = StateStore(store.directory)
    with pytest.raises(StateStoreError, match=f"process {os.getpid()}"):
        second.open()
    store.close()
    store.close()
    second.open()
    second.close()


def test_directories_on_the_way_that_are_missing_are_private_as_well(tmp_path):
    """Of several processes each has one below `state_dir`, which a single process must take again."""
    store = StateStore(tmp_path / "state" / "2-processes" / "0")
    store.open()
    store.close()
    for path in (store.directory, *store.directory.parents[:2]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    single = StateStore(tmp_path / "state")
    single.open()
    single.close()


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_directory_that_others_can_enter_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(StateStoreError, match="chmod 700"):
        StateStore(tmp_path).open()


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(StateStoreError, match=r"belongs to user \d+, not to user 4711"):
        StateStore(tmp_path).open()


def test_a_link_to_the_directory_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StateStoreError, match="symbolic"):
        StateStore(tmp_path / "link").open()


def test_a_lock_that_is_a_link_is_not_followed(store):
    store.close()
    lock = store.directory / "lock"
    lock.rename(store.directory / "elsewhere")
    lock.symlink_to(store.directory / "elsewhere")
    with pytest.raises(OSError):
        store.open()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StateStoreError):
        StateStore(tmp_path / "file").open()
    with pytest.raises(OSError):
        ensure_private_dir(tmp_path / "file" / "below")
