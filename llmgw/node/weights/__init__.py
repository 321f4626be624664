"""The node's cache of models: brought from a hub or web server, resumable, verified, removed only on purpose (C8).

The cache is laid out as a hub's own cache (`models--ORG--NAME/{blobs,refs,snapshots}`), so its files can be used by
other programs and theirs by us. What llmgw itself has to remember lies in `.llmgw`: a manifest per source, which alone
says when the files are complete, and lock files that lock only while somebody holds them open.
"""
