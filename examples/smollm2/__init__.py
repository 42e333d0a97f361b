"""A language model on the CPU whose attention, and whose memory of the conversation, live in an attnd server."""
