// Replaces the content when the server sends a new one. What a user types stays.
"use strict";
const state = document.getElementById("state"), content = document.getElementById("content"), page = document.body.dataset.page;
const changed = field =>
  field === document.activeElement ||
  (field.type === "checkbox" ? field.checked !== field.defaultChecked :
   field.options ? !field.options[field.selectedIndex].defaultSelected : field.value !== field.defaultValue);
const follow = () => {
  const source = new EventSource(document.body.dataset.events + "?page=" + encodeURIComponent(page));
  source.onopen = () => { state.textContent = "live"; };
  source.onerror = () => { state.textContent = "not live since " + new Date().toLocaleTimeString(); };
  source.onmessage = event => {
    if (![...content.querySelectorAll("input, select")].some(changed)) content.innerHTML = event.data;
  };
};
if (page) follow();
