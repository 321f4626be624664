"""The gateway: speaks the OpenAI API to clients and relays to the engines that serve the model (F1-F4)."""
