"""A few sentences of the kind that is asked and answered: the random checkpoints' tokenizer learns its merges here."""

from __future__ import annotations

SAMPLES = (
    "You are a helpful assistant.",
    "What is in this picture? Describe the image in one sentence, please.",
    "There is a red circle to the left of a blue square, and a small green triangle above them.",
    "How many shapes are there in the first picture, and how many in the second one?",
    "The two images show the same thing, but the colours are different: yellow here, purple there.",
    "Hello! How are you today? I am well, thank you. What can I do for you?",
    "Read the text of the document and answer the question: who signed the letter, and when was it sent?",
    "The weather in the city was cold and rainy; the temperature was below ten degrees for the whole week.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
    '{"type": "function", "function": {"description": "Look something up", "parameters": {"type": "object"}}}',
    "Which of the pictures has more circles? Answer with one word: first or second.",
    "An encoder turns each picture into tokens, and the language model reads them together with the words.",
)
