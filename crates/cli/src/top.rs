//! `tenmil top`: live view of the reactors, threads and pollers of a running process.
//!
//! | module | contents |
//! |---|---|
//! | `link`, `query` | sampling thread on the control socket, and its queries |
//! | `sample`, `rates`, `history` | samples, rates between two samples, busy share of the last minute |
//! | `state`, `order`, `keys` | application state, order of the rows, key bindings |
//! | `draw`, `header`, `tables`, `grid`, `format` | rendering of the state into terminal cells |
//! | `screen` | the terminal |
//! | `print` | one sample as text and as JSON |
//!
//! Only `link` and `screen` do I/O; all other modules work on plain values.

mod draw;
mod format;
mod grid;
mod header;
mod history;
#[cfg(test)]
mod json_schema;
mod keys;
mod link;
mod order;
mod print;
mod query;
mod rates;
mod sample;
mod screen;
mod state;
mod tables;
#[cfg(test)]
#[allow(dead_code, reason = "the tests of the program use all of it")]
#[path = "../tests/terminal/mod.rs"]
mod terminal;

use tenmil_base::Span;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_rpc::Client;

use tenmil_base::Error;

/// Watches process `pid`, or the only running one, on this terminal until the user quits.
pub(crate) fn watch(
    directory: RuntimeDirectory,
    pid: Option<u32>,
    interval: Span,
    is_coloured: bool,
) -> Result<(), Error> {
    let link = link::SamplerHandle::start(directory, pid, interval)?;
    screen::run(&link, draw::Theme { is_coloured })
}

/// The tables of two samples, `interval` apart, as plain text.
pub(crate) fn once(client: &mut Client, interval: Span) -> Result<String, Error> {
    Ok(print::text(&print::sample_twice(client, interval)?))
}

/// The same as JSON.
pub(crate) fn json(client: &mut Client, interval: Span) -> Result<String, Error> {
    Ok(format!("{:#}\n", print::json(&print::sample_twice(client, interval)?)))
}
