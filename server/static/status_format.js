// Numbers as people read them. Pure.
"use strict";

const DASH = "–";

/**
 * @param {number} value
 * @returns {string} With separators, no fraction.
 */
function formatCount(value) {
  return Math.round(value).toLocaleString("en");
}

/**
 * @param {number} perSecond
 * @returns {string} With one decimal where it is small.
 */
function formatRate(perSecond) {
  return perSecond > 0 && perSecond < 10 ? perSecond.toFixed(1) : formatCount(perSecond);
}

/**
 * @param {number} share 0..1
 * @returns {string} In percent.
 */
function formatShare(share) {
  return `${Math.round(share * 100)} %`;
}

/**
 * @param {?number} ms
 * @returns {string} In the unit that fits.
 */
function formatMs(ms) {
  if (ms === null) return DASH;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

/**
 * @param {number} seconds How old something is.
 * @returns {string}
 */
function formatAge(seconds) {
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return formatSpan(seconds);
}

/**
 * @param {number} seconds
 * @returns {string} In the two largest units.
 */
function formatSpan(seconds) {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [whole / 86400, (whole / 3600) % 24, (whole / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes) return `${minutes} min ${whole % 60} s`;
  return `${whole} s`;
}

/**
 * @param {number} unixTime Seconds since 1970.
 * @returns {string} The date where it is not today's, and the time of day.
 */
function formatTime(unixTime) {
  const date = new Date(unixTime * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toISOString().slice(0, 10)} ${time}`;
}

/**
 * @param {number} value Above 0.
 * @returns {number} The next 1, 2 or 5 times a power of ten: an axis that ends there seldom jumps.
 */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}
