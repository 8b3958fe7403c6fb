//! `tenmil top`: live view of the reactors, threads, pollers and I/O of a running process.
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

mod app_state;
mod busy_history;
mod draw_screen;
mod format;
mod header;
#[cfg(test)]
mod json_schema;
mod key_bindings;
mod process_queries;
mod process_sample;
mod rates;
mod row_order;
mod sample_output;
mod sampling_thread;
mod screen_tables;
mod table_grid;
#[cfg(test)]
#[allow(dead_code, reason = "the tests of the program use all of it")]
#[path = "../tests/program/terminal.rs"]
mod terminal;
mod terminal_screen;

use tenmil_base::Span;
use tenmil_linux::running_processes::ProcessSearch;
use tenmil_rpc::RpcClient;

use tenmil_base::Error;

pub(crate) use sampling_thread::WatchedProcess;

/// Watches the selected process, or the only running one, on this terminal until the user quits.
pub(crate) fn run_live_view(
    search: ProcessSearch,
    selected: Option<WatchedProcess>,
    interval: Span,
    is_coloured: bool,
) -> Result<(), Error> {
    let link = sampling_thread::SamplerHandle::start(search, selected, interval)?;
    terminal_screen::run_screen(&link, draw_screen::ScreenTheme { is_coloured })
}

/// The tables of two samples, `interval` apart, as plain text.
pub(crate) fn sample_twice_as_text(
    client: &mut RpcClient,
    interval: Span,
) -> Result<String, Error> {
    Ok(sample_output::state_text(&sample_output::sample_twice(client, interval)?))
}

/// The same as JSON.
pub(crate) fn sample_twice_as_json(
    client: &mut RpcClient,
    interval: Span,
) -> Result<String, Error> {
    Ok(format!(
        "{:#}\n",
        sample_output::state_json(&sample_output::sample_twice(client, interval)?)
    ))
}
