"""What may not stand in the corpus is kept out, by words and by name; the excerpts hold none."""

import io
import tarfile

import pytest

from training.data.tables import held_out_text
from training.data.text import KINDS
from training.extract import extract
from training.licences import Exclusion, forbidden
from training.packages import read_packages

PLANTED = {
    "# under the Creative Commons Attribution-NonCommercial 4.0 International": "NonCommercial",
    "licensed CC BY-SA 4.0": "CC BY-SA",
    "see https://creativecommons.org/licenses/by-nc-nd/4.0/": "creativecommons.org/licenses/by-",
    "Attribution-\nShareAlike": "ShareAlike",
    "You can redistribute it under the terms of the GNU Lesser\nGeneral Public License": (
        "GNU Lesser General Public License"
    ),
    "License: AGPLv3+": "AGPLv3",
    "License :: LGPL": "LGPL",
    "Mozilla Public License 2.0": "Mozilla Public License",
    "for non-commercial use": "non-commercial",
    "LLAMA 3 COMMUNITY LICENSE AGREEMENT": "COMMUNITY LICENSE",
    "Proprietary and confidential. All rights reserved.": "Proprietary and confidential",
    "NVIDIA retains all intellectual property": "retains all intellectual",
    "Used with express permission of the original author.": "permission of the original author",
    "# Taken from\n# https://stackoverflow.com/a/123": "Taken from # https://stackoverflow",
    "material from the Wikipedia article": "material from the Wikipedia",
}
FINE = [
    "Licensed under the Apache License, Version 2.0",
    "Redistribution and use in source and binary forms, All rights reserved.",
    "Copyright (c) 2001 Python Software Foundation; PSF license",
    "import matplotlib as mpl\nmpl.rcdefaults()  # since mpl3.1",
    "released under CC0, https://creativecommons.org/publicdomain/zero/1.0/",
    "See Wikipedia for more.",
    "use ssl to keep what is said confidential",
]
BODY = "".join(f"def function_{i}(number):\n    return number + {i}\n\n\n" for i in range(20))
TEXT = "A sentence that stands in the documentation of a package, and says little.\n" * 12


@pytest.mark.parametrize("text", PLANTED, ids=lambda text: text[:20])
def test_planted_notices_are_found(text):
    assert forbidden(f"x = 1\n{text}\ny = 2\n") == PLANTED[text]


@pytest.mark.parametrize("text", FINE, ids=lambda text: text[:20])
def test_permissive_notices_pass(text):
    assert forbidden(text) is None


def archive(folder, files):
    path = folder / "some-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"some-1.0/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


FILES = {
    "some/good.py": "# Apache License\n" + BODY,
    "some/header.py": "# CC BY-NC 4.0, in a header that is cut off\n" + BODY,
    "docs/good.rst": TEXT,
    "docs/copyleft.rst": TEXT + "This page is under the GFDL.\n",
    "docs/named.rst": TEXT.upper(),
}


def test_extraction_drops_whole_files_header_and_all(tmp_path):
    found = extract(archive(tmp_path, FILES), [Exclusion("docs/named.rst", "because")])
    assert found.dropped == {"some/header.py": "CC BY-NC", "docs/copyleft.rst": "GFDL"}
    assert (found.code, found.prose) == ([BODY.strip("\n") + "\n"], [TEXT])


def test_a_folder_is_left_out_whole_and_a_name_that_changed_is_an_error(tmp_path):
    path = archive(tmp_path, FILES)
    assert extract(path, [Exclusion("docs/", "because")]).prose == []
    with pytest.raises(ValueError, match=r"some-1\.0\.tar\.gz: .* name no file: docs/old\.rst"):
        extract(path, [Exclusion("docs/old.rst", "because")])


@pytest.mark.parametrize("kind", KINDS)
def test_the_held_out_excerpts_hold_no_such_words(kind):
    found = {words for document in held_out_text(kind) if (words := forbidden(document))}
    assert found == set()


def test_licences_of_what_is_taken_are_permissive_and_every_exclusion_has_a_reason():
    known = {"MIT", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "Apache-2.0", "PSF-2.0", "Zlib",
             "CC0-1.0", "CC-BY-3.0", "CC-BY-4.0", "Matplotlib licence"}  # fmt: skip
    for package in read_packages():
        parts = package.licence.replace(" OR ", " AND ").split(" AND ")
        assert {part.partition(" (")[0] for part in parts} <= known, package.name
        assert all(len(each.reason) > 8 for each in package.exclude), package.name
