"""Twenty prompts of different kinds, for comparisons of whole answers."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village at the edge of the forest, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "The following is a list of European countries:\n1.",
    "SELECT name, age FROM users WHERE",
    "Translate to French: Good morning, my friend.\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer briefly.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Zürich, São Paulo, Kraków and",
    "日本の首都は",
    "😀😃😄",
    '{"name": "Ada", "age": 36, "languages": [',
    "E = mc^2 means that",
    "    \n\n\t  indented",
    "A",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.zeros((3, 4))\nprint(",
)
