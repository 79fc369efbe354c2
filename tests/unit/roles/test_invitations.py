"""Invitations: their lines, their keys, and who holds them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dreamfleet.errors import ConfigError
from dreamfleet.roles.invitations import (
    FOLDER,
    Invited,
    Place,
    find_url,
    first_invitation,
    invitations,
    invite,
    read_place,
    read_url,
    revoke,
    url,
    write_place,
)
from dreamfleet.transport import Identity, Keys, RoleKey

KEYS = Keys.generate()


@pytest.mark.parametrize("host", ["10.0.0.5", "gpu-box", "fd00::5"])
def test_a_line_holds_all_that_is_needed(tmp_path: Path, host: str) -> None:
    invitation = first_invitation(tmp_path, KEYS)
    text = url(Place(host, 5550, {"actor": 5551}), invitation)
    address, key = read_url(f" '{text}' ")
    assert (address.host, address.port) == (host, 5550)
    assert key == RoleKey.from_text(invitation.key)
    assert KEYS.secret.hex() not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10.0.0.5:5550", "is not the address of a run: copy the whole"),
        ("tcp://10.0.0.5:5550/#env.abc", "is not the address of a run"),
        ("dreamfleet://10.0.0.5/#env.abc", "is not the address of a run"),
        ("dreamfleet://10.0.0.5:port/#env.abc", "is not the address of a run"),
        ("dreamfleet://10.0.0.5:99999/#env.abc", "is not the address of a run"),
        ("dreamfleet://[10.0.0.5:5550/#env.abc", "is not the address of a run"),
        ("dreamfleet://10.0.0.5:5550/", "has no key"),
        ("dreamfleet://10.0.0.5:5550/#env.abc", "key after the '#' is damaged"),
        ("", "is not the address of a run"),
    ],
)
def test_other_lines_are_refused_without_their_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read_url(text)
    assert "env.abc" not in str(error.value)


def test_an_address_is_typed_or_found_in_a_file_or_in_a_directory(tmp_path: Path) -> None:
    """Secrets of containers are files, and the nodes of a cluster share the run's directory."""
    place = Place("gpu1", 5550, {"actor": 5551})
    write_place(tmp_path, place)
    with pytest.raises(ConfigError, match="cannot be joined: start it"):
        find_url(str(tmp_path))
    with pytest.raises(ConfigError, match="'' is not the address of a run"):
        read_url(find_url(""))
    invitation = first_invitation(tmp_path, KEYS)
    wanted = url(place, invitation)
    assert find_url(wanted) == find_url(str(tmp_path)) == wanted
    file = tmp_path / "line"
    for text in (wanted, f"{wanted}\n", f"To join, type\n  dreamfleet join '{wanted}' --envs 4\n"):
        file.write_text(text)
        assert find_url(str(file)) == wanted
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_url(str(file))
    revoke(tmp_path, invitation.name)
    with pytest.raises(ConfigError, match="dreamfleet invite"):
        find_url(str(tmp_path))


def test_invitations_are_known_until_they_are_revoked(tmp_path: Path) -> None:
    known = Invited(tmp_path)
    stranger = KEYS.invite("env")
    assert known.identify(stranger.public) is None
    first, laptop = first_invitation(tmp_path, KEYS), invite(tmp_path, "laptop", KEYS)
    publics = [RoleKey.from_text(each.key).public for each in (first, laptop)]
    assert [known.identify(each) for each in publics] == [
        Identity("env", "first"),
        Identity("env", "laptop"),
    ]
    revoke(tmp_path, "laptop")
    assert known.revoked() == {"laptop"}
    assert [known.identify(each) for each in publics] == [Identity("env", "first"), None]
    assert known.identify(stranger.public) is None


def test_a_run_makes_one_by_itself_and_another_when_that_is_revoked(tmp_path: Path) -> None:
    first = first_invitation(tmp_path, KEYS)
    assert first_invitation(tmp_path, KEYS) == first  # also when the run is resumed
    revoke(tmp_path, first.name)
    second = first_invitation(tmp_path, KEYS)
    assert second.key != first.key
    assert [(each.name, each.revoked) for each in invitations(tmp_path)] == [
        ("first", True),
        ("first-2", False),
    ]


def test_only_their_owner_can_read_them(tmp_path: Path) -> None:
    first_invitation(tmp_path, KEYS)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / FOLDER / "first.json").stat().st_mode) == 0o600


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    invite(tmp_path, "laptop", KEYS)
    with pytest.raises(ConfigError, match="The name 'laptop' is or was used"):
        invite(tmp_path, "laptop", KEYS)
    for name in ("", "../laptop", "a b", "x" * 41, ".hidden"):
        with pytest.raises(ConfigError, match="cannot name an invitation"):
            invite(tmp_path, name, KEYS)
    with pytest.raises(ConfigError, match=r"no invitation 'box'; those of .* are: laptop"):
        revoke(tmp_path, "box")


def test_damaged_files_let_nobody_in_and_break_nothing(tmp_path: Path) -> None:
    good = invite(tmp_path, "laptop", KEYS)
    (tmp_path / FOLDER / "torn.json").write_text('{"name": "torn", "ke')
    (tmp_path / FOLDER / "odd.json").write_text('{"name": "odd", "key": "env.x", "made": 1.0}')
    known = Invited(tmp_path)
    assert known.identify(RoleKey.from_text(good.key).public) == Identity("env", "laptop")
    (tmp_path / FOLDER / "place").write_text("{")
    assert read_place(tmp_path) is None
    write_place(tmp_path, Place("box", 5550, {"actor": 5551}))
    assert read_place(tmp_path) == Place("box", 5550, {"actor": 5551})
