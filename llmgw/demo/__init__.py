"""`llmgw demo`: the whole pair on one machine, with a real model and nothing downloaded."""
