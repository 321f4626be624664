"""What is wrong with a node, decided from what was seen: fast to say so, slow to take it back.

Pure: facts, what was known before, and the time in; problems and what to remember out.
"""
