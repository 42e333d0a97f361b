"""A language model on the CPU whose attention, and whose memory of the text, live in an attnd server.

Read in this order:

1. `generate.py`: the scheduler. All conversations form one ragged batch: first every row reads its whole prompt, then
   each reads its newest token, and a row that ends gives its pages back.
2. `attention.py`: what the model asks of attention, and how an attnd cache answers: one call per layer and step.
3. `llama.py`: the dense layers. What is between `step.attend` and `step.attend` is all that stays on this machine.
4. `model_file.py`, `chat.py`: weights, vocabulary and chat template out of one GGUF file.
5. `server.py`, `report.py`, `terminal.py`, `command.py`: the demonstration around it.
"""
