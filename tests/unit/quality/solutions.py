"""A right answer to each task of the small set, so that its tests are known to be right."""

SOLUTIONS = {
    "running_total": """
def running_total(values):
    sums, total = [], 0
    for value in values:
        total += value
        sums.append(total)
    return sums
""",
    "count_vowels": "def count_vowels(text):\n    return sum(letter in 'aeiou' for letter in text.lower())\n",
    "rotate_left": """
def rotate_left(items, steps):
    if not items:
        return []
    steps %= len(items)
    return items[steps:] + items[:steps]
""",
    "is_leap_year": """
def is_leap_year(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
""",
    "merge_sorted": "def merge_sorted(left, right):\n    return sorted(left + right)\n",
    "most_common_word": """
def most_common_word(text):
    words = text.lower().split()
    return min(set(words), key=lambda word: (-words.count(word), word))
""",
    "flatten": """
def flatten(nested):
    flat = []
    for item in nested:
        flat += flatten(item) if isinstance(item, list) else [item]
    return flat
""",
    "binary_search": """
def binary_search(items, wanted):
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(items) and items[low] == wanted else -1
""",
    "roman": """
def roman(number):
    text = ''
    signs = 'M CM D CD C XC L XL X IX V IV I'.split()
    for value, sign in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), signs):
        while number >= value:
            text += sign
            number -= value
    return text
""",
    "balanced": """
def balanced(text):
    closes, stack = {')': '(', ']': '[', '}': '{'}, []
    for letter in text:
        if letter in closes.values():
            stack.append(letter)
        elif letter in closes and (not stack or stack.pop() != closes[letter]):
            return False
    return not stack
""",
    "prime_factors": """
def prime_factors(number):
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
""",
    "transpose": "def transpose(rows):\n    return [list(column) for column in zip(*rows)]\n",
    "run_lengths": """
def run_lengths(text):
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return runs
""",
    "parse_duration": """
import re
def parse_duration(text):
    return sum(int(n) * {'h': 3600, 'm': 60, 's': 1}[unit] for n, unit in re.findall(r'([0-9]+)([hms])', text))
""",
    "second_largest": """
def second_largest(numbers):
    different = sorted(set(numbers))
    return different[-2] if len(different) > 1 else None
""",
    "chunks": "def chunks(items, size):\n    return [items[n:n + size] for n in range(0, len(items), size)]\n",
    "caesar": """
def caesar(text, shift):
    def moved(letter):
        for first in 'aA':
            if letter.isascii() and 0 <= ord(letter) - ord(first) < 26:
                return chr((ord(letter) - ord(first) + shift) % 26 + ord(first))
        return letter
    return ''.join(map(moved, text))
""",
    "longest_increasing_run": """
def longest_increasing_run(numbers):
    best = length = 0
    for place, number in enumerate(numbers):
        length = length + 1 if place and number > numbers[place - 1] else 1
        best = max(best, length)
    return best
""",
    "overlap": "def overlap(first, second):\n    return max(0, min(first[1], second[1]) - max(first[0], second[0]))\n",
    "change": """
def change(amount, coins):
    least = [0] + [None] * amount
    for sum_ in range(1, amount + 1):
        ways = [least[sum_ - coin] for coin in coins if coin <= sum_ and least[sum_ - coin] is not None]
        least[sum_] = min(ways) + 1 if ways else None
    return least[amount]
""",
}
