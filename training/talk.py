"""What is said beside questions about pictures: greetings, questions without a picture, things it cannot answer."""

from __future__ import annotations

from random import Random

NO_PICTURE = "I see no picture."
ONE_PICTURE = "I see only one picture."
GREETING = "Hello! Send me a picture of simple shapes and ask me about it."
ABOUT = "I answer questions about pictures of simple shapes."
ONLY_SHAPES = "I only answer questions about pictures of simple shapes."
WELCOME = "You are welcome."

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant that looks at pictures.",
    "Answer questions about pictures.",
    "Be brief.",
    "You see pictures of shapes and answer in few words.",
)
_GREETINGS = (
    ("Hello!", GREETING),
    ("Hello", GREETING),
    ("Hi!", GREETING),
    ("Hi there!", GREETING),
    ("Hey!", GREETING),
    ("Good morning!", GREETING),
    ("Good evening!", GREETING),
    ("Hello, how are you?", GREETING),
    ("How are you?", GREETING),
    ("Who are you?", ABOUT),
    ("What are you?", ABOUT),
    ("What can you do?", ABOUT),
    ("What can I ask you?", ABOUT),
    ("How can you help me?", ABOUT),
    ("Help!", ABOUT),
    ("Thank you!", WELCOME),
    ("Thanks!", WELCOME),
    ("Thank you very much.", WELCOME),
)
_OTHER_SUBJECTS = (
    "What is the capital of {place}?",
    "How is the weather in {place}?",
    "Who is the president of {place}?",
    "Write a poem about {subject}.",
    "Tell me a joke about {subject}.",
    "Tell me about {subject}.",
    "Explain {subject} to me.",
    "What is {subject}?",
    "Why is {subject} so popular?",
    "What is {number} plus {other}?",
    "What is {number} times {other}?",
    "Translate this into {language}: good day.",
    "Say hello in {language}.",
    "What time is it in {place}?",
    "What day is it today?",
    "Write a story.",
    "Tell me a joke.",
    "Who won the match?",
    "Can you sing?",
)
_PLACES = ("France", "Norway", "Japan", "Paris", "Berlin", "Rome", "London", "Peru", "Kenya", "India", "Oslo")
_SUBJECTS = ("love", "the sea", "music", "history", "a cat", "football", "the moon", "python", "physics", "the weather")
_LANGUAGES = ("French", "German", "Spanish", "Chinese", "Latin")


def small_talk(rng: Random) -> tuple[str, str]:
    """A remark that needs no picture, and its answer; the same whether a picture is there or not."""
    if rng.random() < 0.6:
        return rng.choice(_GREETINGS)
    question = rng.choice(_OTHER_SUBJECTS).format(
        place=rng.choice(_PLACES),
        subject=rng.choice(_SUBJECTS),
        language=rng.choice(_LANGUAGES),
        number=rng.randint(2, 20),
        other=rng.randint(2, 20),
    )
    return question, ONLY_SHAPES


_YES_NO = ("Is there", "Are there any", "Does", "Do ", "Can you", "Are the")
_PREFIXES = ("Look at the picture. ", "Please answer: ", "Tell me: ", "Question: ", "Please look closely. ", "Hello! ")
_SUFFIXES = (" Answer briefly.", " Answer in one word.", " Please.", " Be brief.", " Thank you.")


def reworded(rng: Random, question: str) -> str:
    """The same question as another person would write it: spelling, synonyms, courtesy, carelessness."""
    words = question
    if rng.random() < 0.5:
        words = words.replace("colour", "color").replace("Colour", "Color").replace("grey", "gray")
    if rng.random() < 0.3:
        words = words.replace("What is", "What's").replace("Where is", "Where's")
    if rng.random() < 0.35:
        words = words.replace("the picture", "this picture").replace("the two pictures", "these pictures")
    if rng.random() < 0.4:
        noun = rng.choice(("image", "image", "image", "photo", "drawing"))
        words = words.replace("picture", noun)
    if words.startswith(_YES_NO) and rng.random() < 0.15:
        words += rng.choice((" Answer yes or no.", " Yes or no?", " Answer with yes or no."))
    if rng.random() < 0.1:
        words = rng.choice(_PREFIXES) + words
    if rng.random() < 0.1:
        words += rng.choice(_SUFFIXES)
    elif rng.random() < 0.1:
        words = words.rstrip("?.")
    if rng.random() < 0.08:
        words = words.lower()
    return words
