// Replaces the content when the server sends a new one. What a user types stays.
"use strict";
const state = document.getElementById("state"), content = document.getElementById("content");
const source = new EventSource("/events?page=" + encodeURIComponent(document.body.dataset.page));
source.onopen = () => { state.textContent = "live"; };
source.onerror = () => { state.textContent = "not live since " + new Date().toLocaleTimeString(); };
source.onmessage = event => {
  const typed = content.querySelector("input");
  if (typed && document.activeElement === typed) return;
  content.innerHTML = event.data;
};
