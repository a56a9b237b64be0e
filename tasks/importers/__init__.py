"""Job files and command lines of other launchers, translated to job files of ours.

Each format has a module of its own that is a pure translation: a document in, a draft of a job out.
What has no place in our job is said, with its line and the reason; nothing is dropped in silence.
"""
