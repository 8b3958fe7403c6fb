//! Tables: their columns and rows.

use super::format::{count, escape, percent, rate, span};
use super::grid::{Cell, Column, Grid, Tone, Width};
use super::history::MinuteHistory;
use super::rates::{PollerRates, ReactorRates, ThreadRates};
use super::sample::{Poller, Reactor, Sample, Thread};
use super::state::{AppState, DisplayedSample, Running, Table};

const fn column(head: &'static str, width: Width, rank: u8) -> Column {
    Column { head, width, rank }
}

const REACTORS: &[Column] = &[
    column("reactor", Width::Number, 0),
    column("core", Width::Number, 7),
    column("polls", Width::Word, 9),
    column("now", Width::Word, 3),
    column("busy %", Width::Number, 0),
    column("", Width::Picture(6, 24), 1),
    column("last minute", Width::Picture(11, 60), 5),
    column("migrations/s", Width::Number, 8),
    column("sleeps/s", Width::Number, 2),
    column("msgs/s", Width::Number, 4),
    column("threads", Width::Number, 11),
    column("too long", Width::Number, 12),
    column("longest", Width::Number, 6),
    column("in", Width::Name(16), 10),
];

const THREADS: &[Column] = &[
    column("thread", Width::Number, 5),
    column("name", Width::Name(12), 0),
    column("home", Width::Number, 2),
    column("mask", Width::Name(8), 4),
    column("busy %", Width::Number, 0),
    column("", Width::Picture(6, 24), 1),
    column("msgs/s", Width::Number, 3),
    column("migrations", Width::Number, 6),
    column("channels", Width::Number, 8),
    column("pollers", Width::Number, 7),
];

const POLLERS: &[Column] = &[
    column("poller", Width::Name(12), 0),
    column("kind", Width::Word, 4),
    column("woken by", Width::Name(10), 3),
    column("polls/s", Width::Number, 1),
    column("found %", Width::Number, 0),
    column("", Width::Picture(6, 24), 2),
];

const PROCESSES: &[Column] =
    &[column("process", Width::Number, 0), column("command line", Width::Name(20), 0)];

/// Builds a table from the state.
pub(crate) fn table(state: &AppState, table: Table) -> Grid<'_> {
    match table {
        Table::Reactors => reactors(state),
        Table::Threads => threads(state),
        Table::Pollers => pollers(state, &state.poller_rows()),
    }
}

/// Table of the pollers of all threads.
pub(crate) fn all_pollers(state: &AppState) -> Grid<'_> {
    let count = state.shown.as_ref().map_or(0, |shown| shown.sample.pollers.len());
    pollers(state, &(0..count).collect::<Vec<_>>())
}

/// Table of the processes to select from.
pub(crate) fn processes(running: &[Running]) -> Grid<'_> {
    let row = |it: &Running| vec![number(it.pid.to_string()), text(escape(&it.command_line))];
    Grid { columns: PROCESSES, rows: running.iter().map(row).collect() }
}

fn reactors(state: &AppState) -> Grid<'_> {
    let rows = state.shown.iter().flat_map(|shown| {
        let rates = shown.rates.as_ref();
        state.reactor_rows().into_iter().map(move |at| {
            let reactor = &shown.sample.reactors[at];
            let rates = rates.and_then(|rates| rates.reactors.get(at));
            reactor_row(&shown.sample, reactor, rates, state.reactors.get(&reactor.id))
        })
    });
    Grid { columns: REACTORS, rows: rows.collect() }
}

fn reactor_row<'a>(
    sample: &Sample,
    reactor: &Reactor,
    rates: Option<&ReactorRates>,
    minute: Option<&'a MinuteHistory>,
) -> Vec<Cell<'a>> {
    let is_stuck = rates.is_some_and(|rates| rates.is_stuck);
    let now = match (is_stuck, reactor.sleeping) {
        (true, _) => Cell::Text("stalled".into(), Tone::Alarm),
        (false, true) => quiet("sleeping"),
        (false, false) => text("awake".into()),
    };
    // For a stalled reactor, the running poller matters, not the slowest one so far.
    let cause = if is_stuck { &reactor.running } else { &reactor.longest_iteration_cause };
    let cause = match cause {
        Some(name) if is_stuck => Cell::Text(format!("stalled in {}", escape(name)), Tone::Alarm),
        Some(name) => text(escape(name)),
        None => quiet("-"),
    };
    let too_long = match reactor.iterations_too_long {
        0 => quiet("0"),
        iterations => Cell::Text(count(iterations), Tone::Alarm),
    };
    let threads = sample.threads.iter().filter(|thread| thread.reactor == reactor.id).count();
    vec![
        number(reactor.id.to_string()),
        number(reactor.core.to_string()),
        text(escape(&reactor.mode)),
        now,
        share(rates.map(|rates| rates.busy_percent)),
        rates.map_or(Cell::Empty, |rates| Cell::Bar(rates.busy_percent)),
        minute.map_or(Cell::Empty, Cell::History),
        per_second(rates.map(|rates| rates.migrations)),
        per_second(rates.map(|rates| rates.sleeps)),
        per_second(rates.map(|rates| rates.messages)),
        number(threads.to_string()),
        too_long,
        text(span(reactor.longest_iteration_ns)),
        cause,
    ]
}

fn threads(state: &AppState) -> Grid<'_> {
    let rows = state.shown.iter().flat_map(|DisplayedSample { sample, rates }| {
        state.thread_rows().into_iter().map(move |at| {
            let rates = rates.as_ref().and_then(|rates| rates.threads.get(at));
            thread_row(sample, &sample.threads[at], rates)
        })
    });
    Grid { columns: THREADS, rows: rows.collect() }
}

fn thread_row<'a>(sample: &Sample, thread: &Thread, rates: Option<&ThreadRates>) -> Vec<Cell<'a>> {
    let pollers = sample.pollers.iter().filter(|poller| poller.thread_id == thread.id).count();
    vec![
        number(thread.id.to_string()),
        text(escape(&thread.name)),
        number(thread.reactor.to_string()),
        thread.mask.as_ref().map_or(quiet("any"), |mask| text(escape(mask))),
        share(rates.map(|rates| rates.busy_percent)),
        rates.map_or(Cell::Empty, |rates| Cell::Bar(rates.busy_percent)),
        per_second(rates.map(|rates| rates.messages)),
        number(count(thread.migrations)),
        number(count(thread.channels)),
        number(pollers.to_string()),
    ]
}

fn pollers<'a>(state: &AppState, rows: &[usize]) -> Grid<'a> {
    let rows = rows.iter().filter_map(|at| {
        let DisplayedSample { sample, rates } = state.shown.as_ref()?;
        let rates = rates.as_ref().and_then(|rates| rates.pollers.get(*at));
        Some(poller_row(sample.pollers.get(*at)?, rates))
    });
    Grid { columns: POLLERS, rows: rows.collect() }
}

fn poller_row<'a>(poller: &Poller, rates: Option<&PollerRates>) -> Vec<Cell<'a>> {
    let kind = match (poller.paused, poller.every_ns) {
        (true, _) => quiet("paused"),
        (false, Some(every_ns)) => text(format!("every {}", span(every_ns))),
        (false, None) => text("active".into()),
    };
    let found = rates.and_then(|rates| rates.found_percent);
    vec![
        text(escape(&poller.name)),
        kind,
        text(escape(&poller.wake)),
        per_second(rates.map(|rates| rates.polls)),
        found.map_or(quiet("-"), |found| text(percent(found))),
        found.map_or(Cell::Empty, Cell::Bar),
    ]
}

fn text<'a>(text: String) -> Cell<'a> {
    Cell::Text(text, Tone::Normal)
}

fn number<'a>(number: String) -> Cell<'a> {
    let tone = if number == "0" { Tone::Quiet } else { Tone::Normal };
    Cell::Text(number, tone)
}

fn quiet<'a>(text: &str) -> Cell<'a> {
    Cell::Text(text.to_owned(), Tone::Quiet)
}

fn per_second<'a>(value: Option<f64>) -> Cell<'a> {
    value.map_or(quiet("-"), |value| number(rate(value)))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 100")]
fn share<'a>(value: Option<f64>) -> Cell<'a> {
    let Some(value) = value else { return quiet("-") };
    Cell::Text(percent(value), Tone::Share(value.clamp(0.0, 100.0) as u8))
}

#[cfg(test)]
mod tests {
    use super::{all_pollers, table};
    use crate::top::state::tests::{sample, watching};
    use crate::top::state::{Table, Update};

    #[test]
    fn the_tables_say_what_was_measured() {
        let state = watching(2, 3);
        let reactors = table(&state, Table::Reactors).lines();
        let expected = "\
reactor  core  polls     now       busy %  migrations/s  sleeps/s  msgs/s  threads  too long  longest  in
      0     0  adaptive  sleeping     0.0             0        40    3.2k        2         0   250 us  poller 'queue-0'
      1     1  adaptive  awake       10.0             0        40    3.2k        1         0   250 us  poller 'queue-1'
";
        assert_eq!(reactors, expected);
        let threads = table(&state, Table::Threads).lines();
        let expected = "\
thread  name      home  mask  busy %  msgs/s  migrations  channels  pollers
     2  thread-2     0  0-3     20.0       7           2         1        1
     1  thread-1     1  any     10.0       7           1         1        1
     0  thread-0     0  0-3      0.0       7           0         1        1
";
        assert_eq!(threads, expected);
        let pollers = table(&state, Table::Pollers).lines();
        let expected = "\
poller   kind    woken by      polls/s  found %
queue-2  active  a descriptor      100     25.0
";
        assert_eq!(pollers, expected);
        assert_eq!(all_pollers(&state).rows.len(), 3);
    }

    #[test]
    fn one_that_is_stuck_is_said_to_be_and_in_whom() {
        let mut state = watching(2, 3);
        let mut stuck = sample(20, 2, 3);
        stuck.monotonic_ns += 1_000_000_000;
        stuck.reactors[1].running = Some("poller 'endless'".into());
        state.take(Update::Looked { sample: stuck, policy: None });
        let lines = table(&state, Table::Reactors).lines();
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
    fn before_there_are_rates_there_are_dashes() {
        let mut state = watching(0, 0);
        state.take(Update::Attached(crate::top::state::tests::process()));
        state.take(Update::Looked { sample: sample(1, 1, 1), policy: None });
        for which in Table::ALL {
            assert!(table(&state, which).lines().contains(" -"), "{which:?}");
        }
    }
}
