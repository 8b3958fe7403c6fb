//! Key bindings and their effect on the state.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::order::Sort;
use super::state::{AppState, ConnectionStage, Table};

/// Command for the sampling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Attach to this process.
    Attach(u32),
    /// Detach, and list the running processes.
    List,
}

/// All keys with their descriptions.
pub(crate) const KEYS: [(&str, &str); 10] = [
    ("up down, j k", "choose another row"),
    ("PgUp PgDn Home End", "further, and to the ends"),
    ("tab, shift-tab", "go to the next table, or back"),
    ("enter", "show only the threads of the chosen reactor, or all again; choose a process"),
    ("s, S", "sort the table by the next column, or the previous one"),
    ("p, space", "pause, and go on"),
    ("l", "list the processes that run"),
    ("?, h", "show this"),
    ("esc", "take back: this, or the choice of a reactor"),
    ("q, ctrl-c", "quit"),
];

/// Rows per page.
const PAGE: isize = 10;

impl AppState {
    /// Handles a key, and returns a command for the sampling thread if the key needs one.
    pub(crate) fn press(&mut self, key: KeyEvent) -> Option<Request> {
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
            KeyCode::Esc => self.clear_selection(),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-PAGE),
            KeyCode::PageDown => self.step(PAGE),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            KeyCode::Tab | KeyCode::Right => self.go(1),
            KeyCode::BackTab | KeyCode::Left => self.go(Table::ALL.len() - 1),
            KeyCode::Char('s') => self.sort_by(1),
            KeyCode::Char('S') => self.sort_by(-1),
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('l') => return Some(Request::List),
            KeyCode::Enter => return self.enter(),
            _ => {}
        }
        None
    }

    fn clear_selection(&mut self) {
        if self.is_help {
            self.is_help = false;
        } else {
            self.is_narrow = false;
        }
    }

    fn enter(&mut self) -> Option<Request> {
        if let ConnectionStage::Choosing(running) = &self.stage {
            return running.get(self.chosen.process).map(|running| Request::Attach(running.pid));
        }
        if self.focus == Table::Reactors {
            self.is_narrow = !self.is_narrow;
        }
        None
    }

    fn go(&mut self, tables: usize) {
        let place = Table::ALL.iter().position(|table| *table == self.focus).unwrap_or(0);
        self.focus = Table::ALL[(place + tables) % Table::ALL.len()];
    }

    fn sort_by(&mut self, step: isize) {
        let all = Sort::of(self.focus);
        let now = self.sort(self.focus);
        let place = all.iter().position(|sort| *sort == now).unwrap_or(0);
        let next = place.cast_signed().wrapping_add(step).rem_euclid(all.len().cast_signed());
        self.sorts.insert(self.focus, all[next.cast_unsigned()]);
    }

    /// Moves the selection down by this many rows.
    fn step(&mut self, rows: isize) {
        if let ConnectionStage::Choosing(running) = &self.stage {
            self.chosen.process = moved_index(self.chosen.process, rows, running.len());
            return;
        }
        let Some(sample) = self.shown.as_ref().map(|shown| &shown.sample) else { return };
        match self.focus {
            Table::Reactors => {
                let rows_shown = self.reactor_rows();
                let ids: Vec<u32> = rows_shown.iter().map(|at| sample.reactors[*at].id).collect();
                self.chosen.reactor = id_after(&ids, self.chosen_reactor(), rows);
            }
            Table::Threads => {
                let rows_shown = self.thread_rows();
                let ids: Vec<u32> = rows_shown.iter().map(|at| sample.threads[*at].id).collect();
                self.chosen.thread = id_after(&ids, self.chosen_thread(), rows);
                self.chosen.poller = 0;
            }
            Table::Pollers => {
                let count = self.poller_rows().len();
                self.chosen.poller = moved_index(self.chosen.poller, rows, count);
            }
        }
    }
}

fn id_after(ids: &[u32], chosen: Option<u32>, rows: isize) -> Option<u32> {
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

    use super::Request;
    use crate::top::order::Sort;
    use crate::top::state::tests::watching;
    use crate::top::state::{AppState, Running, Table, Update};

    fn press(state: &mut AppState, codes: &[KeyCode]) -> Option<Request> {
        let press = |code: &KeyCode| state.press(KeyEvent::new(*code, KeyModifiers::NONE));
        codes.iter().map(press).last().flatten()
    }

    #[test]
    fn the_choice_moves_within_the_table_and_stays_with_its_thread() {
        let mut state = watching(2, 5);
        press(&mut state, &[KeyCode::Down, KeyCode::Char('j')]);
        assert_eq!(state.chosen_thread(), Some(2));
        press(&mut state, &[KeyCode::Char('s')]);
        assert_eq!((state.sort(Table::Threads), state.chosen_thread()), (Sort::Number, Some(2)));
        press(&mut state, &[KeyCode::End]);
        assert_eq!(state.chosen_thread(), Some(4));
        press(&mut state, &[KeyCode::Home, KeyCode::Up]);
        assert_eq!(state.chosen_thread(), Some(0));
        press(&mut state, &[KeyCode::PageDown, KeyCode::PageUp, KeyCode::Char('k')]);
        assert_eq!(state.chosen_thread(), Some(0));
    }

    #[test]
    fn every_table_is_reached_and_sorted_by_everything_and_back() {
        let mut state = watching(2, 5);
        for table in [Table::Threads, Table::Pollers, Table::Reactors, Table::Threads] {
            assert_eq!(state.focus, table);
            for sort in Sort::of(table).iter().chain(&Sort::of(table)[..1]) {
                assert_eq!(state.sort(table), *sort);
                press(&mut state, &[KeyCode::Char('s'), KeyCode::Down, KeyCode::End]);
            }
            press(&mut state, &[KeyCode::Char('S')]);
            assert_eq!(state.sort(table), Sort::of(table)[0]);
            press(&mut state, &[KeyCode::Tab]);
        }
        press(&mut state, &[KeyCode::BackTab]);
        assert_eq!(state.focus, Table::Threads);
    }

    #[test]
    fn enter_narrows_to_a_reactor_and_escape_widens() {
        let mut state = watching(2, 5);
        press(&mut state, &[KeyCode::BackTab, KeyCode::Down, KeyCode::Enter]);
        assert_eq!(state.thread_rows(), [3, 1]);
        press(&mut state, &[KeyCode::Char('?'), KeyCode::Esc]);
        assert!(!state.is_help && state.is_narrow, "one thing at a time");
        press(&mut state, &[KeyCode::Esc]);
        assert_eq!(state.thread_rows().len(), 5);
    }

    #[test]
    fn a_process_is_chosen_from_those_that_run() {
        let mut state = AppState::default();
        let running = |pid| Running { pid, ..Running::default() };
        state.take(Update::Running(vec![running(7), running(8)]));
        assert_eq!(press(&mut state, &[KeyCode::Enter]), Some(Request::Attach(7)));
        let keys = [KeyCode::Down, KeyCode::Down, KeyCode::Enter];
        assert_eq!(press(&mut state, &keys), Some(Request::Attach(8)));
        assert_eq!(press(&mut state, &[KeyCode::Char('l')]), Some(Request::List));
    }

    #[test]
    fn it_ends_when_told_and_a_key_that_is_let_go_does_nothing() {
        let ended = |code, modifiers| {
            let mut state = AppState::default();
            state.press(KeyEvent::new(code, modifiers));
            state.is_over
        };
        assert!(ended(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(ended(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!ended(KeyCode::Char('c'), KeyModifiers::NONE));
        let mut state = AppState::default();
        let kind = KeyEventKind::Release;
        let key = KeyEvent::new_with_kind(KeyCode::Char('q'), KeyModifiers::NONE, kind);
        state.press(key);
        assert!(!state.is_over);
    }

    #[test]
    fn keys_without_anything_to_act_on_do_no_harm() {
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
            assert_eq!(press(&mut state, &all), None);
        }
        let mut empty = watching(0, 0);
        (0..3).for_each(|_| assert_eq!(press(&mut empty, &all), None));
    }
}
