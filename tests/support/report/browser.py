"""A headless Chromium that opens pages, as a reader with a laptop or a phone does."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

LAPTOP, PHONE = 1440, 360
_DRAWN = "return document.documentElement.dataset.drawn"
_SECONDS = 600.0  # a machine may be busy; nothing is timed here


class Browser:
    """Opens files; keeps what the console said."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = LAPTOP, dark: bool = False) -> None:
        """Open a page and wait until its figures are drawn."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        self.command("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        self.driver.get(page.absolute().as_uri())
        WebDriverWait(self.driver, _SECONDS).until(lambda driver: driver.execute_script(_DRAWN))

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """Chrome's own commands, beyond what drivers have in common."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the console said since the last time, but for remarks of level INFO."""
        said = self.driver.get_log("browser")
        return [json.dumps(line) for line in said if line["level"] != "INFO"]


@contextmanager
def started() -> Iterator[Browser]:
    """A browser, closed at the end; skips where there is none."""
    chromium, chromedriver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or chromedriver is None:
        pytest.skip("no chromium with its chromedriver here: `make browser` installs them")
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
