//! Tables: their columns and rows.

use super::app_state::{AppState, DisplayedSample, RunningProcess, ScreenTable};
use super::busy_history::BusyHistory;
use super::format::{escape, format_count, format_percent, format_rate, format_span};
use super::process_sample::{PollerSample, ProcessSample, ReactorSample, ThreadSample};
use super::rates::{PollerRates, ReactorRates, ThreadRates};
use super::table_grid::{ColumnWidth, GridCell, GridColumn, TableGrid, TextTone};
use crate::io_rates::{COLUMNS, IoRates, IoRow};

const fn new_column(head: &'static str, width: ColumnWidth, rank: u8) -> GridColumn {
    GridColumn { head, width, rank }
}

const REACTORS: &[GridColumn] = &[
    new_column("reactor", ColumnWidth::Number, 0),
    new_column("core", ColumnWidth::Number, 7),
    new_column("polls", ColumnWidth::Word, 9),
    new_column("now", ColumnWidth::Word, 3),
    new_column("busy %", ColumnWidth::Number, 0),
    new_column("", ColumnWidth::Picture(6, 24), 1),
    new_column("last minute", ColumnWidth::Picture(11, 60), 5),
    new_column("migrations/s", ColumnWidth::Number, 8),
    new_column("sleeps/s", ColumnWidth::Number, 2),
    new_column("msgs/s", ColumnWidth::Number, 4),
    new_column("threads", ColumnWidth::Number, 11),
    new_column("too long", ColumnWidth::Number, 12),
    new_column("longest", ColumnWidth::Number, 6),
    new_column("in", ColumnWidth::Name(16), 10),
];

const THREADS: &[GridColumn] = &[
    new_column("thread", ColumnWidth::Number, 5),
    new_column("name", ColumnWidth::Name(12), 0),
    new_column("home", ColumnWidth::Number, 2),
    new_column("mask", ColumnWidth::Name(8), 4),
    new_column("busy %", ColumnWidth::Number, 0),
    new_column("", ColumnWidth::Picture(6, 24), 1),
    new_column("msgs/s", ColumnWidth::Number, 3),
    new_column("migrations", ColumnWidth::Number, 6),
    new_column("channels", ColumnWidth::Number, 8),
    new_column("pollers", ColumnWidth::Number, 7),
];

const POLLERS: &[GridColumn] = &[
    new_column("poller", ColumnWidth::Name(12), 0),
    new_column("kind", ColumnWidth::Word, 4),
    new_column("woken by", ColumnWidth::Name(10), 3),
    new_column("polls/s", ColumnWidth::Number, 1),
    new_column("found %", ColumnWidth::Number, 0),
    new_column("", ColumnWidth::Picture(6, 24), 2),
];

const IO: &[GridColumn] = &[
    new_column("export", ColumnWidth::Name(20), 0),
    new_column("r/s", ColumnWidth::Number, 0),
    new_column("rkB/s", ColumnWidth::Number, 2),
    new_column("r_await", ColumnWidth::Number, 4),
    new_column("w/s", ColumnWidth::Number, 1),
    new_column("wkB/s", ColumnWidth::Number, 3),
    new_column("w_await", ColumnWidth::Number, 5),
    new_column("f/s", ColumnWidth::Number, 8),
    new_column("f_await", ColumnWidth::Number, 10),
    new_column("d/s", ColumnWidth::Number, 11),
    new_column("aqu-sz", ColumnWidth::Number, 6),
    new_column("%util", ColumnWidth::Number, 9),
    new_column("lim/s", ColumnWidth::Number, 12),
    new_column("lim_wait", ColumnWidth::Number, 13),
    new_column("err/s", ColumnWidth::Number, 7),
];

const PROCESSES: &[GridColumn] = &[
    new_column("process", ColumnWidth::Number, 0),
    new_column("command line", ColumnWidth::Name(20), 0),
];

/// Builds a table from the state.
pub(crate) fn screen_table(state: &AppState, table: ScreenTable) -> TableGrid<'_> {
    match table {
        ScreenTable::Reactors => reactor_table(state),
        ScreenTable::Threads => thread_table(state),
        ScreenTable::Pollers => poller_table(state, &state.poller_rows()),
        ScreenTable::Io => io_table(state),
    }
}

/// Columns are those of `tenmil iostat`.
fn io_table(state: &AppState) -> TableGrid<'_> {
    let row = |(row, rates): (&IoRow, Option<IoRates>)| {
        let mut cells = vec![text_cell(row.title())];
        match rates {
            None => cells.extend(COLUMNS.map(|_| dim_cell("-"))),
            Some(rates) => cells.extend(rates.values().into_iter().zip(COLUMNS).map(
                |(value, (name, digits))| match (name, value > 0.0) {
                    (_, false) => dim_cell("0"),
                    ("err/s", true) => GridCell::Text(format_rate(value), TextTone::Alarm),
                    _ if digits > 0 => text_cell(format!("{value:.digits$}")),
                    _ => text_cell(format_rate(value)),
                },
            )),
        }
        cells
    };
    TableGrid { columns: IO, rows: state.io_rows().into_iter().map(row).collect() }
}

/// Table of the pollers of all threads.
pub(crate) fn all_pollers_table(state: &AppState) -> TableGrid<'_> {
    let count = state.shown.as_ref().map_or(0, |shown| shown.sample.pollers.len());
    poller_table(state, &(0..count).collect::<Vec<_>>())
}

/// Table of the processes to select from.
pub(crate) fn process_table(running: &[RunningProcess]) -> TableGrid<'_> {
    let row = |it: &RunningProcess| {
        vec![number_cell(it.pid.to_string()), text_cell(escape(&it.command_line))]
    };
    TableGrid { columns: PROCESSES, rows: running.iter().map(row).collect() }
}

fn reactor_table(state: &AppState) -> TableGrid<'_> {
    let rows = state.shown.iter().flat_map(|shown| {
        let rates = shown.rates.as_ref();
        state.reactor_rows().into_iter().map(move |at| {
            let reactor = &shown.sample.reactors[at];
            let rates = rates.and_then(|rates| rates.reactors.get(at));
            reactor_row(&shown.sample, reactor, rates, state.reactors.get(&reactor.id))
        })
    });
    TableGrid { columns: REACTORS, rows: rows.collect() }
}

fn reactor_row<'a>(
    sample: &ProcessSample,
    reactor: &ReactorSample,
    rates: Option<&ReactorRates>,
    minute: Option<&'a BusyHistory>,
) -> Vec<GridCell<'a>> {
    let is_stuck = rates.is_some_and(|rates| rates.is_stuck);
    let now = match (is_stuck, reactor.sleeping) {
        (true, _) => GridCell::Text("stalled".into(), TextTone::Alarm),
        (false, true) => dim_cell("sleeping"),
        (false, false) => text_cell("awake".into()),
    };
    // For a stalled reactor, the running poller matters, not the slowest one so far.
    let cause = if is_stuck { &reactor.running } else { &reactor.longest_iteration_cause };
    let cause = match cause {
        Some(name) if is_stuck => {
            GridCell::Text(format!("stalled in {}", escape(name)), TextTone::Alarm)
        }
        Some(name) => text_cell(escape(name)),
        None => dim_cell("-"),
    };
    let too_long = match reactor.iterations_too_long {
        0 => dim_cell("0"),
        iterations => GridCell::Text(format_count(iterations), TextTone::Alarm),
    };
    let threads = sample.threads.iter().filter(|thread| thread.reactor == reactor.id).count();
    vec![
        number_cell(reactor.id.to_string()),
        number_cell(reactor.core.to_string()),
        text_cell(escape(&reactor.mode)),
        now,
        busy_cell(rates.map(|rates| rates.busy_percent)),
        rates.map_or(GridCell::Empty, |rates| GridCell::Bar(rates.busy_percent)),
        minute.map_or(GridCell::Empty, GridCell::History),
        rate_cell(rates.map(|rates| rates.migrations)),
        rate_cell(rates.map(|rates| rates.sleeps)),
        rate_cell(rates.map(|rates| rates.messages)),
        number_cell(threads.to_string()),
        too_long,
        text_cell(format_span(reactor.longest_iteration_ns)),
        cause,
    ]
}

fn thread_table(state: &AppState) -> TableGrid<'_> {
    let rows = state.shown.iter().flat_map(|DisplayedSample { sample, rates }| {
        state.thread_rows().into_iter().map(move |at| {
            let rates = rates.as_ref().and_then(|rates| rates.threads.get(at));
            thread_row(sample, &sample.threads[at], rates)
        })
    });
    TableGrid { columns: THREADS, rows: rows.collect() }
}

fn thread_row<'a>(
    sample: &ProcessSample,
    thread: &ThreadSample,
    rates: Option<&ThreadRates>,
) -> Vec<GridCell<'a>> {
    let pollers = sample.pollers.iter().filter(|poller| poller.thread_id == thread.id).count();
    vec![
        number_cell(thread.id.to_string()),
        text_cell(escape(&thread.name)),
        number_cell(thread.reactor.to_string()),
        thread.mask.as_ref().map_or(dim_cell("any"), |mask| text_cell(escape(mask))),
        busy_cell(rates.map(|rates| rates.busy_percent)),
        rates.map_or(GridCell::Empty, |rates| GridCell::Bar(rates.busy_percent)),
        rate_cell(rates.map(|rates| rates.messages)),
        number_cell(format_count(thread.migrations)),
        number_cell(format_count(thread.channels)),
        number_cell(pollers.to_string()),
    ]
}

fn poller_table<'a>(state: &AppState, rows: &[usize]) -> TableGrid<'a> {
    let rows = rows.iter().filter_map(|at| {
        let DisplayedSample { sample, rates } = state.shown.as_ref()?;
        let rates = rates.as_ref().and_then(|rates| rates.pollers.get(*at));
        Some(poller_row(sample.pollers.get(*at)?, rates))
    });
    TableGrid { columns: POLLERS, rows: rows.collect() }
}

fn poller_row<'a>(poller: &PollerSample, rates: Option<&PollerRates>) -> Vec<GridCell<'a>> {
    let kind = match (poller.paused, poller.every_ns) {
        (true, _) => dim_cell("paused"),
        (false, Some(every_ns)) => text_cell(format!("every {}", format_span(every_ns))),
        (false, None) => text_cell("active".into()),
    };
    let found = rates.and_then(|rates| rates.found_percent);
    vec![
        text_cell(escape(&poller.name)),
        kind,
        text_cell(escape(&poller.wake)),
        rate_cell(rates.map(|rates| rates.polls)),
        found.map_or(dim_cell("-"), |found| text_cell(format_percent(found))),
        found.map_or(GridCell::Empty, GridCell::Bar),
    ]
}

fn text_cell<'a>(text: String) -> GridCell<'a> {
    GridCell::Text(text, TextTone::Normal)
}

fn number_cell<'a>(number: String) -> GridCell<'a> {
    let tone = if number == "0" { TextTone::Quiet } else { TextTone::Normal };
    GridCell::Text(number, tone)
}

fn dim_cell<'a>(text: &str) -> GridCell<'a> {
    GridCell::Text(text.to_owned(), TextTone::Quiet)
}

fn rate_cell<'a>(value: Option<f64>) -> GridCell<'a> {
    value.map_or(dim_cell("-"), |value| number_cell(format_rate(value)))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 100")]
fn busy_cell<'a>(value: Option<f64>) -> GridCell<'a> {
    let Some(value) = value else { return dim_cell("-") };
    GridCell::Text(format_percent(value), TextTone::Share(value.clamp(0.0, 100.0) as u8))
}

#[cfg(test)]
mod tests {
    use super::{all_pollers_table, screen_table};
    use crate::top::app_state::tests::{test_sample, watching_state};
    use crate::top::app_state::{SamplerUpdate, ScreenTable};

    #[test]
    fn tables_show_the_measured_values() {
        let state = watching_state(2, 3);
        let reactors = screen_table(&state, ScreenTable::Reactors).text_lines();
        let expected = "\
reactor  core  polls     now       busy %  migrations/s  sleeps/s  msgs/s  threads  too long  longest  in
      0     0  adaptive  sleeping     0.0             0        40    3.2k        2         0   250 us  poller 'queue-0'
      1     1  adaptive  awake       10.0             0        40    3.2k        1         0   250 us  poller 'queue-1'
";
        assert_eq!(reactors, expected);
        let threads = screen_table(&state, ScreenTable::Threads).text_lines();
        let expected = "\
thread  name      home  mask  busy %  msgs/s  migrations  channels  pollers
     2  thread-2     0  0-3     20.0       7           2         1        1
     1  thread-1     1  any     10.0       7           1         1        1
     0  thread-0     0  0-3      0.0       7           0         1        1
";
        assert_eq!(threads, expected);
        let pollers = screen_table(&state, ScreenTable::Pollers).text_lines();
        let expected = "\
poller   kind    woken by      polls/s  found %
queue-2  active  a descriptor      100     25.0
";
        assert_eq!(pollers, expected);
        assert_eq!(all_pollers_table(&state).rows.len(), 3);
    }

    #[test]
    fn stuck_reactor_is_shown_with_its_poller() {
        let mut state = watching_state(2, 3);
        let mut stuck = test_sample(20, 2, 3);
        stuck.monotonic_ns += 1_000_000_000;
        stuck.reactors[1].running = Some("poller 'endless'".into());
        state.apply_update(SamplerUpdate::Looked { sample: stuck, policy: None });
        let lines = screen_table(&state, ScreenTable::Reactors).text_lines();
        let line = lines.lines().nth(2).unwrap();
        assert!(
            line.contains(" stalled ") && line.ends_with("stalled in poller 'endless'"),
            "{line}"
        );
        assert!(
            lines.lines().nth(1).unwrap().contains("sleeping"),
            "a sleeping reactor is not stalled"
        );
    }

    #[test]
    fn missing_rates_are_shown_as_dashes() {
        let mut state = watching_state(0, 0);
        state.apply_update(SamplerUpdate::Attached(crate::top::app_state::tests::test_process()));
        state.apply_update(SamplerUpdate::Looked { sample: test_sample(1, 1, 1), policy: None });
        for which in ScreenTable::ALL {
            assert!(screen_table(&state, which).text_lines().contains(" -"), "{which:?}");
        }
    }
}
