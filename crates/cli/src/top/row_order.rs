//! Rows of the tables and their order.

use super::app_state::{AppState, IoPage, ScreenTable};
use crate::io_rates::{IoRates, IoRow};

/// Sort key of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableSort {
    Number,
    Name,
    Home,
    Busy,
    Messages,
    Sleeps,
    Migrations,
    Longest,
    Polls,
    Found,
    Reads,
    Writes,
    BytesRead,
    BytesWritten,
    ReadAwait,
    WriteAwait,
    QueueSize,
    Errors,
}

impl TableSort {
    /// Sort keys of a table; the first one is the default.
    pub(crate) const fn sorts_of_table(table: ScreenTable) -> &'static [Self] {
        match table {
            ScreenTable::Reactors => &[
                Self::Number,
                Self::Busy,
                Self::Sleeps,
                Self::Messages,
                Self::Migrations,
                Self::Longest,
            ],
            ScreenTable::Threads => &[
                Self::Busy,
                Self::Number,
                Self::Name,
                Self::Home,
                Self::Messages,
                Self::Migrations,
            ],
            ScreenTable::Pollers => &[Self::Number, Self::Name, Self::Polls, Self::Found],
            ScreenTable::Io => &[
                Self::Name,
                Self::Reads,
                Self::BytesRead,
                Self::ReadAwait,
                Self::Writes,
                Self::BytesWritten,
                Self::WriteAwait,
                Self::QueueSize,
                Self::Errors,
            ],
        }
    }

    /// Name of the sort key.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Number => "number",
            Self::Name => "name",
            Self::Home => "home",
            Self::Busy => "busy",
            Self::Messages => "messages",
            Self::Sleeps => "sleeps",
            Self::Migrations => "migrations",
            Self::Longest => "longest iteration",
            Self::Polls => "polls",
            Self::Found => "found work",
            Self::Reads => "r/s",
            Self::Writes => "w/s",
            Self::BytesRead => "rkB/s",
            Self::BytesWritten => "wkB/s",
            Self::ReadAwait => "r_await",
            Self::WriteAwait => "w_await",
            Self::QueueSize => "aqu-sz",
            Self::Errors => "err/s",
        }
    }
}

/// Row index with its sort key: names and numbers ascend, amounts descend.
type SortKey<'a> = (usize, f64, &'a str);

impl AppState {
    /// Current sort key of a table.
    pub(crate) fn current_sort(&self, table: ScreenTable) -> TableSort {
        self.sorts.get(&table).copied().unwrap_or(TableSort::sorts_of_table(table)[0])
    }

    /// Reactors to show, as indices into the sample.
    pub(crate) fn reactor_rows(&self) -> Vec<usize> {
        let Some(shown) = &self.shown else { return Vec::new() };
        let rates = shown.rates.as_ref().map(|rates| &rates.reactors);
        let rate = |index: usize| rates.and_then(|rates| rates.get(index)).copied();
        let sort = self.current_sort(ScreenTable::Reactors);
        let row = |(index, reactor): (usize, &super::process_sample::ReactorSample)| {
            let rate = rate(index).unwrap_or_default();
            let key = match sort {
                TableSort::Busy => round_percent(rate.busy_percent),
                TableSort::Sleeps => rate.sleeps,
                TableSort::Messages => rate.messages,
                TableSort::Migrations => rate.migrations,
                TableSort::Longest => sort_number(reactor.longest_iteration_ns),
                _ => 0.0,
            };
            (index, -key, "")
        };
        sort_rows(shown.sample.reactors.iter().enumerate().map(row).collect())
    }

    /// Threads to show, as indices into the sample.
    pub(crate) fn thread_rows(&self) -> Vec<usize> {
        let Some(shown) = &self.shown else { return Vec::new() };
        let rates = shown.rates.as_ref().map(|rates| &rates.threads);
        let rate = |index: usize| rates.and_then(|rates| rates.get(index)).copied();
        let only = self.selected_reactor().filter(|_| self.is_narrow);
        let sort = self.current_sort(ScreenTable::Threads);
        let threads = shown.sample.threads.iter().enumerate();
        let threads = threads.filter(|(_, thread)| only.is_none_or(|only| only == thread.reactor));
        let row = |(index, thread): (usize, &'_ super::process_sample::ThreadSample)| {
            let rate = rate(index).unwrap_or_default();
            match sort {
                TableSort::Busy => (index, -round_percent(rate.busy_percent), ""),
                TableSort::Messages => (index, -rate.messages, ""),
                TableSort::Migrations => (index, -sort_number(thread.migrations), ""),
                TableSort::Home => (index, f64::from(thread.reactor), ""),
                _ => (index, 0.0, ""),
            }
        };
        if sort == TableSort::Name {
            return sort_rows(threads.map(|(index, it)| (index, 0.0, it.name.as_str())).collect());
        }
        sort_rows(threads.map(row).collect())
    }

    /// Pollers of the selected thread, as indices into the sample.
    pub(crate) fn poller_rows(&self) -> Vec<usize> {
        let (Some(shown), Some(thread)) = (&self.shown, self.selected_thread()) else {
            return Vec::new();
        };
        let rates = shown.rates.as_ref().map(|rates| &rates.pollers);
        let rate = |index: usize| rates.and_then(|rates| rates.get(index)).copied();
        let sort = self.current_sort(ScreenTable::Pollers);
        let pollers = shown.sample.pollers.iter().enumerate();
        let pollers = pollers.filter(|(_, poller)| poller.thread_id == thread);
        if sort == TableSort::Name {
            return sort_rows(pollers.map(|(index, it)| (index, 0.0, it.name.as_str())).collect());
        }
        let row = |(index, _)| {
            let rate = rate(index).unwrap_or_default();
            let key = match sort {
                TableSort::Polls => rate.polls,
                TableSort::Found => rate.found_percent.unwrap_or(-1.0),
                _ => 0.0,
            };
            (index, -key, "")
        };
        sort_rows(pollers.map(row).collect())
    }

    /// Rows of the I/O page, with their rates if there are two samples.
    pub(crate) fn io_rows(&self) -> Vec<(&IoRow, Option<IoRates>)> {
        let IoPage { before, now, .. } = &self.io_page;
        let Some(now) = now else { return Vec::new() };
        let mut rows: Vec<_> = match before {
            Some(before) => now.rates(before).map(|(row, rates)| (row, Some(rates))).collect(),
            None => now.rates(now).map(|(row, _)| (row, None)).collect(),
        };
        let amount = |rates: &Option<IoRates>| {
            let Some(rates) = rates else { return 0.0 };
            match self.current_sort(ScreenTable::Io) {
                TableSort::Reads => rates.reads,
                TableSort::Writes => rates.writes,
                TableSort::BytesRead => rates.read_kib,
                TableSort::BytesWritten => rates.written_kib,
                TableSort::ReadAwait => rates.read_await_ms,
                TableSort::WriteAwait => rates.write_await_ms,
                TableSort::QueueSize => rates.queue,
                TableSort::Errors => rates.errors,
                _ => 0.0,
            }
        };
        // The sort is stable, so equal rows stay in the order of their names.
        rows.sort_by(|one, other| amount(&other.1).total_cmp(&amount(&one.1)));
        rows
    }

    /// The selected reactor; by default the first one.
    pub(crate) fn selected_reactor(&self) -> Option<u32> {
        let reactors = &self.shown.as_ref()?.sample.reactors;
        let chosen = reactors.iter().find(|it| Some(it.id) == self.chosen.reactor);
        chosen.map(|it| it.id).or_else(|| {
            self.reactor_rows().first().and_then(|index| Some(reactors.get(*index)?.id))
        })
    }

    /// The selected thread if it is shown, otherwise the first one shown.
    pub(crate) fn selected_thread(&self) -> Option<u32> {
        let threads = &self.shown.as_ref()?.sample.threads;
        let rows = self.thread_rows();
        let mut ids = rows.iter().filter_map(|index| Some(threads.get(*index)?.id));
        let first = ids.clone().next();
        ids.find(|id| Some(*id) == self.chosen.thread).or(first)
    }
}

/// Rounds a percentage, so that rows do not swap for small changes.
fn round_percent(percent: f64) -> f64 {
    percent.round()
}

fn sort_rows(mut rows: Vec<SortKey<'_>>) -> Vec<usize> {
    // The sort is stable, so equal rows stay in numerical order.
    rows.sort_by(|one, other| one.1.total_cmp(&other.1).then_with(|| one.2.cmp(other.2)));
    rows.into_iter().map(|(index, ..)| index).collect()
}

#[expect(clippy::cast_precision_loss, reason = "only compared")]
fn sort_number(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::TableSort;
    use crate::top::app_state::tests::watching_state;
    use crate::top::app_state::{AppState, ScreenTable};

    fn sort_rows(table: ScreenTable, sort: TableSort) -> AppState {
        let mut state = watching_state(2, 5);
        state.sorts.insert(table, sort);
        state
    }

    #[test]
    fn amounts_are_descending_and_names_ascending() {
        assert_eq!(watching_state(2, 5).thread_rows(), [4, 3, 2, 1, 0], "by busy at first");
        assert_eq!(
            sort_rows(ScreenTable::Threads, TableSort::Number).thread_rows(),
            [0, 1, 2, 3, 4]
        );
        assert_eq!(sort_rows(ScreenTable::Threads, TableSort::Name).thread_rows(), [0, 1, 2, 3, 4]);
        assert_eq!(sort_rows(ScreenTable::Threads, TableSort::Home).thread_rows(), [0, 2, 4, 1, 3]);
        assert_eq!(
            sort_rows(ScreenTable::Threads, TableSort::Migrations).thread_rows(),
            [4, 3, 2, 1, 0]
        );
        assert_eq!(watching_state(2, 5).reactor_rows(), [0, 1]);
        assert_eq!(sort_rows(ScreenTable::Reactors, TableSort::Busy).reactor_rows(), [1, 0]);
        assert_eq!(
            sort_rows(ScreenTable::Reactors, TableSort::Sleeps).reactor_rows(),
            [0, 1],
            "equals stay"
        );
    }

    #[test]
    fn threads_are_filtered_by_the_selected_reactor_on_request() {
        let mut state = watching_state(2, 5);
        state.is_narrow = true;
        state.chosen.reactor = Some(1);
        assert_eq!(state.thread_rows(), [3, 1]);
        assert_eq!(state.selected_thread(), Some(3));
        state.chosen.reactor = Some(99);
        assert_eq!(state.selected_reactor(), Some(0), "one that has gone is not chosen any more");
    }

    #[test]
    fn pollers_of_the_selected_thread_are_shown() {
        let mut state = watching_state(2, 5);
        assert_eq!(state.selected_thread(), Some(4));
        assert_eq!(state.poller_rows(), [4]);
        state.chosen.thread = Some(2);
        for sort in TableSort::sorts_of_table(ScreenTable::Pollers) {
            state.sorts.insert(ScreenTable::Pollers, *sort);
            assert_eq!(state.poller_rows(), [2], "{sort:?}");
        }
    }

    #[test]
    fn nothing_is_selected_in_empty_tables() {
        let state = AppState::default();
        assert_eq!((state.selected_reactor(), state.selected_thread()), (None, None));
        assert!(state.reactor_rows().is_empty() && state.poller_rows().is_empty());
    }
}
