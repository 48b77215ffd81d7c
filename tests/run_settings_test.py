"""Tests of `tf_replicas.run_settings`."""

import dataclasses

import pytest

from inception_mini import config
from tf_replicas import run_settings


def test_a_run_remembers_its_settings(tmp_path):
  settings = config.from_recipe("mini", train_dir=str(tmp_path), seed=7)
  run_settings.record(settings)
  assert run_settings.of_run(config.Config, str(tmp_path)) == settings
  assert (
    run_settings.of_run(config.Config, str(tmp_path), image_size=48).image_size
    == 48
  )


def test_the_record_is_read_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run_settings.record(config.Config(train_dir="run", data_dir="photos"))
  monkeypatch.chdir("/")
  settings = run_settings.of_run(config.Config, str(tmp_path / "run"))
  assert settings.data_dir == str(tmp_path / "photos")


def test_says_what_a_run_goes_on_with_otherwise(tmp_path, capsys):
  settings = config.Config(train_dir=str(tmp_path), max_steps=5)
  run_settings.record(settings)
  run_settings.record(dataclasses.replace(settings, max_steps=9))
  assert not capsys.readouterr().out
  changed = config.from_recipe("mini", train_dir=str(tmp_path))
  run_settings.record(changed)
  (line,) = capsys.readouterr().out.splitlines()
  assert "recipe was 'original' and is 'mini'" in line
  assert "image_size was 299 and is 32" in line
  assert "seed" not in line and "max_steps" not in line


def test_a_run_without_record_has_the_defaults(tmp_path):
  assert run_settings.of_run(config.Config, str(tmp_path)) == config.Config(
    train_dir=str(tmp_path)
  )


def test_a_moved_run_is_where_it_is(tmp_path):
  run_settings.record(config.Config(train_dir=str(tmp_path / "before")))
  (tmp_path / "before").rename(tmp_path / "after")
  path = str(tmp_path / "after")
  assert run_settings.of_run(config.Config, path).train_dir == path


@pytest.mark.parametrize("text", ["{", '{"speed": 1}', '{"width": 0}', "[]"])
def test_names_a_damaged_record(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(ValueError, match=r"config\.json is damaged: "):
    run_settings.of_run(config.Config, str(tmp_path))


def test_does_not_call_the_record_damaged_for_a_wrong_setting(tmp_path):
  run_settings.record(config.Config(train_dir=str(tmp_path)))
  with pytest.raises(ValueError, match=r"^`width` must be positive"):
    run_settings.of_run(config.Config, str(tmp_path), width=0.0)
