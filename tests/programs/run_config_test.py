"""Tests of `programs.run_config`."""

import dataclasses

import pytest

from inception_mini import config
from tf_replicas.programs import run_config


def test_a_run_remembers_its_settings(tmp_path):
  settings = config.from_recipe("mini", train_dir=str(tmp_path), seed=7)
  run_config.record(settings)
  assert run_config.of_run(config.Config, str(tmp_path)) == settings
  assert (
    run_config.of_run(config.Config, str(tmp_path), image_size=48).image_size
    == 48
  )


def test_the_record_is_read_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run_config.record(config.Config(train_dir="run", data_dir="photos"))
  monkeypatch.chdir("/")
  settings = run_config.of_run(config.Config, str(tmp_path / "run"))
  assert settings.data_dir == str(tmp_path / "photos")


def test_prints_settings_that_changed(tmp_path, capsys):
  settings = config.Config(train_dir=str(tmp_path), max_steps=5)
  run_config.record(settings)
  run_config.record(dataclasses.replace(settings, max_steps=9))
  assert not capsys.readouterr().out
  changed = config.from_recipe("mini", train_dir=str(tmp_path))
  run_config.record(changed)
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith("settings changed on resuming: ")
  assert "recipe 'original' -> 'mini'" in line
  assert "image_size 299 -> 32" in line
  assert "seed" not in line and "max_steps" not in line


def test_a_run_without_record_has_the_defaults(tmp_path):
  assert run_config.of_run(config.Config, str(tmp_path)) == config.Config(
    train_dir=str(tmp_path)
  )


def test_a_moved_run_is_where_it_is(tmp_path):
  run_config.record(config.Config(train_dir=str(tmp_path / "before")))
  (tmp_path / "before").rename(tmp_path / "after")
  path = str(tmp_path / "after")
  assert run_config.of_run(config.Config, path).train_dir == path


@pytest.mark.parametrize("text", ["{", '{"speed": 1}', '{"width": 0}', "[]"])
def test_names_a_damaged_record(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(
    ValueError, match=r"cannot read the settings of .*config\.json: "
  ):
    run_config.of_run(config.Config, str(tmp_path))


def test_does_not_call_the_record_damaged_for_a_wrong_setting(tmp_path):
  run_config.record(config.Config(train_dir=str(tmp_path)))
  with pytest.raises(ValueError, match=r"^`width` must be in"):
    run_config.of_run(config.Config, str(tmp_path), width=0.0)
