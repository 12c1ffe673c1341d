"""The commands of `engine-stub`, one module each: `command` is the click command, named as the module.

The group finds modules by their file, so that a new command is one new file. Imports that take time
happen inside the commands: `--help` stays quick.
"""
