//! A whole controller: a made-up host in front of it, a made-up medium behind it.

mod admin;
mod bringup;
mod io;
mod reset;
mod rig;
mod signals;
mod sleep;
