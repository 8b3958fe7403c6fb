//! Key bindings and their effect on the state.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::app_state::{AppState, ConnectionStage, IoPage, ScreenTable};
use super::row_order::TableSort;
use crate::io_rates::Grouping;

/// Command for the sampling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SamplerRequest {
    /// Attach to this process.
    Attach(u32),
    /// Detach, and list the running processes.
    List,
    /// Sample the I/O statistics too, by what their rows are about; `None` to stop that.
    SampleIo(Option<Grouping>),
}

/// All keys with their descriptions.
pub(crate) const KEYS: [(&str, &str); 11] = [
    ("up down, j k", "choose another row"),
    ("PgUp PgDn Home End", "further, and to the ends"),
    ("i", "show the I/O of exports and hosts, or the reactors again"),
    ("tab, shift-tab", "go to the next table, or back; of I/O: by namespace, host or export"),
    ("enter", "show only the threads of the chosen reactor, or all again; choose a process"),
    ("s, S", "sort the table by the next column, or the previous one"),
    ("p, space", "pause, and go on"),
    ("l", "list the processes that run"),
    ("?, h", "show this"),
    ("esc", "take back: this, or the choice of a reactor"),
    ("q, ctrl-c", "quit"),
];

/// What the rows of the I/O page are about, in the order of the tab key.
const GROUPINGS: [Grouping; 3] = [Grouping::Namespace, Grouping::Host, Grouping::Export];

/// Rows per page.
const PAGE: isize = 10;

impl AppState {
    /// Handles a key, and returns a command for the sampling thread if the key needs one.
    pub(crate) fn handle_key(&mut self, key: KeyEvent) -> Option<SamplerRequest> {
        if key.kind == KeyEventKind::Release {
            return None;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            self.is_over |= matches!(key.code, KeyCode::Char('c' | 'd'));
            return None;
        }
        match key.code {
            KeyCode::Char('q') => self.is_over = true,
            KeyCode::Char('?' | 'h') => self.is_help = !self.is_help,
            KeyCode::Esc => self.close_help_or_filter(),
            KeyCode::Up | KeyCode::Char('k') => self.move_selection(-1),
            KeyCode::Down | KeyCode::Char('j') => self.move_selection(1),
            KeyCode::PageUp => self.move_selection(-PAGE),
            KeyCode::PageDown => self.move_selection(PAGE),
            KeyCode::Home => self.move_selection(isize::MIN),
            KeyCode::End => self.move_selection(isize::MAX),
            KeyCode::Char('i') => return self.toggle_io_page(),
            KeyCode::Tab | KeyCode::Right => return self.move_focus(1),
            KeyCode::BackTab | KeyCode::Left => return self.move_focus(ScreenTable::ALL.len() - 1),
            KeyCode::Char('s') => self.change_sort(1),
            KeyCode::Char('S') => self.change_sort(-1),
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('l') => return Some(SamplerRequest::List),
            KeyCode::Enter => return self.handle_enter(),
            _ => {}
        }
        None
    }

    fn close_help_or_filter(&mut self) {
        if self.is_help {
            self.is_help = false;
        } else {
            self.is_narrow = false;
        }
    }

    fn handle_enter(&mut self) -> Option<SamplerRequest> {
        if let ConnectionStage::Choosing(running) = &self.stage {
            return running
                .get(self.chosen.process)
                .map(|running| SamplerRequest::Attach(running.pid));
        }
        if self.active_table() == ScreenTable::Reactors {
            self.is_narrow = !self.is_narrow;
        }
        None
    }

    fn toggle_io_page(&mut self) -> Option<SamplerRequest> {
        let IoPage { is_shown, grouping, .. } = &mut self.io_page;
        *is_shown = !*is_shown;
        Some(SamplerRequest::SampleIo(is_shown.then_some(*grouping)))
    }

    /// Table that the keys act on.
    pub(crate) fn active_table(&self) -> ScreenTable {
        if self.io_page.is_shown { ScreenTable::Io } else { self.focus }
    }

    fn move_focus(&mut self, tables: usize) -> Option<SamplerRequest> {
        if self.io_page.is_shown {
            let place = GROUPINGS.iter().position(|one| *one == self.io_page.grouping).unwrap_or(0);
            let grouping = GROUPINGS[(place + tables) % GROUPINGS.len()];
            self.io_page.set_grouping(grouping);
            return Some(SamplerRequest::SampleIo(Some(grouping)));
        }
        let place = ScreenTable::ALL.iter().position(|table| *table == self.focus).unwrap_or(0);
        self.focus = ScreenTable::ALL[(place + tables) % ScreenTable::ALL.len()];
        None
    }

    fn change_sort(&mut self, step: isize) {
        let table = self.active_table();
        let all = TableSort::sorts_of_table(table);
        let now = self.current_sort(table);
        let place = all.iter().position(|sort| *sort == now).unwrap_or(0);
        let next = place.cast_signed().wrapping_add(step).rem_euclid(all.len().cast_signed());
        self.sorts.insert(table, all[next.cast_unsigned()]);
    }

    /// Moves the selection down by this many rows.
    fn move_selection(&mut self, rows: isize) {
        if let ConnectionStage::Choosing(running) = &self.stage {
            self.chosen.process = moved_index(self.chosen.process, rows, running.len());
            return;
        }
        if self.io_page.is_shown {
            self.io_page.chosen = moved_index(self.io_page.chosen, rows, self.io_rows().len());
            return;
        }
        let Some(sample) = self.shown.as_ref().map(|shown| &shown.sample) else { return };
        match self.focus {
            ScreenTable::Reactors => {
                let rows_shown = self.reactor_rows();
                let ids: Vec<u32> = rows_shown.iter().map(|at| sample.reactors[*at].id).collect();
                self.chosen.reactor = id_after_moving(&ids, self.selected_reactor(), rows);
            }
            ScreenTable::Threads => {
                let rows_shown = self.thread_rows();
                let ids: Vec<u32> = rows_shown.iter().map(|at| sample.threads[*at].id).collect();
                self.chosen.thread = id_after_moving(&ids, self.selected_thread(), rows);
                self.chosen.poller = 0;
            }
            ScreenTable::Pollers => {
                let count = self.poller_rows().len();
                self.chosen.poller = moved_index(self.chosen.poller, rows, count);
            }
            // It has the focus on its page only.
            ScreenTable::Io => {}
        }
    }
}

fn id_after_moving(ids: &[u32], chosen: Option<u32>, rows: isize) -> Option<u32> {
    let place = ids.iter().position(|id| Some(*id) == chosen).unwrap_or(0);
    ids.get(moved_index(place, rows, ids.len())).copied()
}

/// Moves an index within a list of `len` rows.
fn moved_index(place: usize, rows: isize, len: usize) -> usize {
    place.saturating_add_signed(rows).min(len.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

    use super::SamplerRequest;
    use crate::io_rates::Grouping;
    use crate::top::app_state::tests::watching_state;
    use crate::top::app_state::{AppState, RunningProcess, SamplerUpdate, ScreenTable};
    use crate::top::row_order::TableSort;

    fn press_keys(state: &mut AppState, codes: &[KeyCode]) -> Option<SamplerRequest> {
        let press = |code: &KeyCode| state.handle_key(KeyEvent::new(*code, KeyModifiers::NONE));
        codes.iter().map(press).last().flatten()
    }

    #[test]
    fn selection_stays_in_the_table_and_follows_its_thread() {
        let mut state = watching_state(2, 5);
        press_keys(&mut state, &[KeyCode::Down, KeyCode::Char('j')]);
        assert_eq!(state.selected_thread(), Some(2));
        press_keys(&mut state, &[KeyCode::Char('s')]);
        assert_eq!(
            (state.current_sort(ScreenTable::Threads), state.selected_thread()),
            (TableSort::Number, Some(2))
        );
        press_keys(&mut state, &[KeyCode::End]);
        assert_eq!(state.selected_thread(), Some(4));
        press_keys(&mut state, &[KeyCode::Home, KeyCode::Up]);
        assert_eq!(state.selected_thread(), Some(0));
        press_keys(&mut state, &[KeyCode::PageDown, KeyCode::PageUp, KeyCode::Char('k')]);
        assert_eq!(state.selected_thread(), Some(0));
    }

    #[test]
    fn every_table_is_reached_and_sorted_by_every_key() {
        let mut state = watching_state(2, 5);
        for table in [
            ScreenTable::Threads,
            ScreenTable::Pollers,
            ScreenTable::Reactors,
            ScreenTable::Threads,
        ] {
            assert_eq!(state.focus, table);
            for sort in TableSort::sorts_of_table(table)
                .iter()
                .chain(&TableSort::sorts_of_table(table)[..1])
            {
                assert_eq!(state.current_sort(table), *sort);
                press_keys(&mut state, &[KeyCode::Char('s'), KeyCode::Down, KeyCode::End]);
            }
            press_keys(&mut state, &[KeyCode::Char('S')]);
            assert_eq!(state.current_sort(table), TableSort::sorts_of_table(table)[0]);
            press_keys(&mut state, &[KeyCode::Tab]);
        }
        press_keys(&mut state, &[KeyCode::BackTab]);
        assert_eq!(state.focus, ScreenTable::Threads);
    }

    #[test]
    fn enter_filters_by_reactor_and_escape_clears_the_filter() {
        let mut state = watching_state(2, 5);
        press_keys(&mut state, &[KeyCode::BackTab, KeyCode::Down, KeyCode::Enter]);
        assert_eq!(state.thread_rows(), [3, 1]);
        press_keys(&mut state, &[KeyCode::Char('?'), KeyCode::Esc]);
        assert!(!state.is_help && state.is_narrow, "one thing at a time");
        press_keys(&mut state, &[KeyCode::Esc]);
        assert_eq!(state.thread_rows().len(), 5);
    }

    #[test]
    fn process_is_selected_from_the_running_ones() {
        let mut state = AppState::default();
        let running = |pid| RunningProcess { pid, ..RunningProcess::default() };
        state.apply_update(SamplerUpdate::Running(vec![running(7), running(8)]));
        assert_eq!(press_keys(&mut state, &[KeyCode::Enter]), Some(SamplerRequest::Attach(7)));
        let keys = [KeyCode::Down, KeyCode::Down, KeyCode::Enter];
        assert_eq!(press_keys(&mut state, &keys), Some(SamplerRequest::Attach(8)));
        assert_eq!(press_keys(&mut state, &[KeyCode::Char('l')]), Some(SamplerRequest::List));
    }

    #[test]
    fn io_page_is_switched_and_its_grouping_is_sampled() {
        let mut state = watching_state(2, 5);
        let sampled = |grouping| Some(SamplerRequest::SampleIo(grouping));
        let by = |grouping| sampled(Some(grouping));
        assert_eq!(press_keys(&mut state, &[KeyCode::Char('i')]), by(Grouping::Namespace));
        assert_eq!(press_keys(&mut state, &[KeyCode::Tab]), by(Grouping::Host));
        assert_eq!(press_keys(&mut state, &[KeyCode::Tab]), by(Grouping::Export));
        assert_eq!(press_keys(&mut state, &[KeyCode::BackTab]), by(Grouping::Host));
        for sort in TableSort::sorts_of_table(ScreenTable::Io) {
            assert_eq!(state.current_sort(ScreenTable::Io), *sort);
            press_keys(&mut state, &[KeyCode::Char('s'), KeyCode::Down, KeyCode::End]);
        }
        assert_eq!(press_keys(&mut state, &[KeyCode::Char('i')]), sampled(None));
        assert_eq!(
            (state.focus, press_keys(&mut state, &[KeyCode::Tab])),
            (ScreenTable::Threads, None)
        );
    }

    #[test]
    fn quit_key_ends_and_a_key_release_does_nothing() {
        let ended = |code, modifiers| {
            let mut state = AppState::default();
            state.handle_key(KeyEvent::new(code, modifiers));
            state.is_over
        };
        assert!(ended(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(ended(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!ended(KeyCode::Char('c'), KeyModifiers::NONE));
        let mut state = AppState::default();
        let kind = KeyEventKind::Release;
        let key = KeyEvent::new_with_kind(KeyCode::Char('q'), KeyModifiers::NONE, kind);
        state.handle_key(key);
        assert!(!state.is_over);
    }

    #[test]
    fn keys_without_a_selection_do_nothing() {
        let mut state = AppState::default();
        let all = [
            KeyCode::Up,
            KeyCode::End,
            KeyCode::Enter,
            KeyCode::Tab,
            KeyCode::Char('s'),
            KeyCode::Char('p'),
            KeyCode::Down,
            KeyCode::Esc,
        ];
        for _ in 0..3 {
            assert_eq!(press_keys(&mut state, &all), None);
        }
        let mut empty = watching_state(0, 0);
        (0..3).for_each(|_| assert_eq!(press_keys(&mut empty, &all), None));
    }
}
