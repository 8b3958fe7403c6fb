//! `top`: what the reactors, threads and pollers of a running process do, second by second.
//!
//! | module | what it is |
//! |---|---|
//! | `link`, `ask` | a thread that asks the process over its socket, and what it asks |
//! | `sample`, `rates`, `minute` | what it answers; what happened between two answers; the last minute |
//! | `state`, `order`, `keys` | what is on the screen, in what order, and what keys do to it |
//! | `draw`, `header`, `tables`, `grid`, `words` | the picture: a state in, cells of a terminal out |
//! | `screen` | the terminal itself |
//! | `print` | one sample as text and as JSON |
//!
//! Only `link` and `screen` touch the world; everything else is plain values.

mod ask;
mod draw;
mod grid;
mod header;
mod keys;
mod link;
mod minute;
mod order;
mod print;
mod rates;
mod sample;
mod screen;
#[cfg(test)]
#[allow(dead_code, reason = "the tests of the program use all of it")]
#[path = "../tests/seat/mod.rs"]
mod seat;
#[cfg(test)]
mod shape;
mod state;
mod tables;
mod words;

use base::Span;
use control::Client;
use host::runtime_directory::RuntimeDirectory;

use crate::Refused;

/// Watches process `pid`, or whoever runs, on this terminal until somebody has seen enough.
pub(crate) fn watch(
    directory: RuntimeDirectory,
    pid: Option<u32>,
    interval: Span,
    is_coloured: bool,
) -> Result<(), Refused> {
    let link = link::Link::start(directory, pid, interval)?;
    screen::run(&link, draw::Theme { is_coloured })
}

/// The tables of two looks, `interval` apart, as plain text.
pub(crate) fn once(client: &mut Client, interval: Span) -> Result<String, Refused> {
    Ok(print::text(&print::look(client, interval)?))
}

/// The same for programs.
pub(crate) fn json(client: &mut Client, interval: Span) -> Result<String, Refused> {
    Ok(format!("{:#}\n", print::json(&print::look(client, interval)?)))
}
