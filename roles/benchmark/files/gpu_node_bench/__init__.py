"""Measures an OpenAI-compatible endpoint by the method that published figures were made with."""

VERSION = "1"
