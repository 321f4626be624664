"""Engines that the agent installs by itself: side by side, each in a virtual environment of its own.

`packages` decides what is installed from where; `shelf` is the folder they stand in; `installer` makes one; `keeper`
sees to it that what the plane wants is there, and that what nothing wants any more goes.
"""
