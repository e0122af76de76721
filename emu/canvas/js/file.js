// Starts from a record that stands in the same file: it is whole, and answers for itself.

import { mount } from "./app.js";

const place = document.getElementById("emu-canvas");
try {
  const record = JSON.parse(document.getElementById("emu-record").textContent);
  window.emuStepper = mount(place, { record, live: false, titled: true });
  window.emuStepper.focus(); // its keys work at once: nothing else on this page has any
} catch (error) {
  place.textContent = `This page cannot show its record: ${error.message}. A newer browser, or the file written anew, may help.`;
  throw error;
}
