"""Files of operators: settings, fleets and keys. Bad input is one clear error, never another."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import yaml
from fuzz_campaign import Unit, corpus
from fuzz_values import json_value, mutated, random_bytes

from vllm_disagg import config
from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.launcher import config_file
from vllm_disagg.launcher import flags as launcher_flags
from vllm_disagg.proxy.http.addresses import parse_networks
from vllm_disagg.proxy.membership.sources import parse_name, read_fleet

SETTINGS = tuple(Config.__struct_fields__)
MAX_LINES = 1  # of an error


class FileTarget:
    """One file after the other, read by each reader of files."""

    unit: Unit = "bodies"
    batch = 400

    def __init__(self, random: Random) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "file"
        self._texts = corpus("files")
        self._parts = corpus("file_parts")
        self._parser = argparse.ArgumentParser()
        launcher_flags.add_arguments(self._parser)
        self._flags = [
            name
            for action in self._parser._actions
            for name in action.option_strings
            if name.startswith("--")
        ]

    def close(self) -> None:
        """Removes the file."""
        self._folder.cleanup()

    def feed(self, random: Random) -> None:
        """Writes one file and reads it by each reader."""
        data = self._content(random)
        self._path.write_bytes(data)
        self._path.chmod(0o600)
        path = str(self._path)
        text = data.decode("latin-1")
        readers: list[Callable[[], object]] = [
            lambda: config_file.expand([f"--config={path}"], self._parser),
            lambda: read_fleet(path),
            lambda: keys.load(path),
            lambda: keys.read_lines(path, "--api-key-file"),
            lambda: config.parse(self._settings(random)),
            lambda: parse_name(text, "--prefill-dns"),
            lambda: parse_networks(text),
        ]
        for read in readers:
            try:
                read()
            except ConfigError as error:
                if len(str(error).splitlines()) > MAX_LINES:
                    raise AssertionError(f"an error of several lines: {error}") from error

    def _content(self, random: Random) -> bytes:
        how = random.random()
        if how < 0.3:
            fields = {random.choice(self._flags)[2:]: json_value(random) for _ in range(3)}
            data = yaml.safe_dump(fields, allow_unicode=random.random() < 0.5).encode()
        elif how < 0.4:
            data = json.dumps({"prefill": json_value(random), "decode": []}).encode()
        else:
            data = random.choice(self._texts)
        if how > 0.97:
            return random_bytes(random, 200)
        return mutated(random, data, self._parts) if random.random() < 0.7 else data

    def _settings(self, random: Random) -> dict[str, object]:
        names = random.choices((*SETTINGS, *config.OLD_NAMES, "hosts"), k=3)
        return {name: json_value(random) for name in names} | {"insecure": random.random() < 0.5}

    def finish(self) -> None:
        """Holds nothing."""
