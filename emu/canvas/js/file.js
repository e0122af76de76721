// Starts from a record that stands in the same file: it is whole, and answers for itself.

import { mount } from "./app.js";

const record = JSON.parse(document.getElementById("emu-record").textContent);
window.emuStepper = mount(document.getElementById("emu-canvas"), { record, live: false });
