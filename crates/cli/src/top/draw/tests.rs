//! Tests of the rendering, compared as text.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;

use super::{Theme, draw, shares};
use crate::top::state::tests::{process, sample, watching};
use crate::top::state::{AppState, EventLine, Running, Table, Update};

const PLAIN: Theme = Theme { is_coloured: false };

fn drawn(state: &AppState, theme: Theme, size: (u16, u16)) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    terminal.draw(|frame| draw(state, theme, frame.buffer_mut())).unwrap();
    terminal
}

/// The screen as lines without trailing blanks.
fn picture(state: &AppState, size: (u16, u16)) -> String {
    let terminal = drawn(state, PLAIN, size);
    let buffer = terminal.backend().buffer();
    let row = |y| (0..size.0).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..size.1).map(|y| row(y).trim_end().to_owned() + "\n").collect()
}

fn check(state: &AppState, size: (u16, u16), expected: &str) {
    let found = picture(state, size);
    assert!(found == expected, "found:\n{found}\nexpected:\n{expected}");
}

#[test]
fn eighty_columns() {
    check(&watching(2, 3), (80, 24), include_str!("tests/80x24.txt"));
}

#[test]
fn a_phone() {
    check(&watching(2, 3), (40, 10), include_str!("tests/40x10.txt"));
}

#[test]
fn a_wall() {
    check(&watching(4, 8), (200, 60), include_str!("tests/200x60.txt"));
}

#[test]
fn no_reactors() {
    check(&watching(0, 0), (80, 12), include_str!("tests/none.txt"));
}

#[test]
fn a_hundred_threads_are_scrolled_to_the_one_that_is_chosen() {
    let mut state = watching(2, 100);
    state.chosen.thread = Some(3);
    check(&state, (80, 24), include_str!("tests/hundred.txt"));
}

#[test]
fn a_process_that_has_gone() {
    let mut state = watching(1, 1);
    state.take(Update::Exited("the process closed the connection".into()));
    check(&state, (80, 12), include_str!("tests/gone.txt"));
}

#[test]
fn several_to_choose_from() {
    let mut state = AppState::default();
    let running = |pid, text: &str| Running { pid, command_line: text.into() };
    let running = vec![running(17, "tenmil perf"), running(4711, "tenmil perf -t \u{1b}[31m60")];
    state.take(Update::Running(running));
    check(&state, (60, 8), include_str!("tests/choose.txt"));
}

#[test]
fn the_help() {
    let mut state = watching(1, 1);
    state.is_help = true;
    check(&state, (100, 22), include_str!("tests/help.txt"));
}

/// State with names that contain terminal control and bidirectional characters.
fn hostile() -> AppState {
    const EVIL: &str = "\u{1b}[2J\u{9b}31m\r\n\t\u{7}\u{202e}\u{200b}一二\u{0}";
    let mut state = AppState::default();
    let mut hostile = process();
    hostile.version = EVIL.into();
    hostile.command_line = vec![EVIL.into(); 3];
    state.take(Update::Attached(hostile));
    for seconds in 1..3 {
        let mut sample = sample(seconds, 2, 3);
        for reactor in &mut sample.reactors {
            reactor.mode = EVIL.into();
            (reactor.longest_iteration_cause, reactor.running) =
                (Some(EVIL.into()), Some(EVIL.into()));
        }
        for thread in &mut sample.threads {
            (thread.name, thread.mask) = (EVIL.into(), Some(EVIL.into()));
        }
        for poller in &mut sample.pollers {
            (poller.name, poller.wake) = (EVIL.into(), EVIL.into());
        }
        state.take(Update::Looked { sample, policy: Some(EVIL.into()) });
    }
    state.take(Update::Happened(EventLine { kind: EVIL.into(), text: EVIL.into() }));
    state
}

#[test]
fn names_full_of_escapes_are_spelled_out_and_not_sent() {
    let mut state = hostile();
    for stage in 0..3 {
        match stage {
            1 => state.take(Update::Exited("\u{1b}]0;gone\u{7}".into())),
            2 => state.take(Update::Silent("\u{1b}c\u{202e}".into())),
            _ => {}
        }
        let text = picture(&state, (200, 40));
        let acts = |c: char| c.is_control() || ['\u{200b}', '\u{202e}'].contains(&c);
        assert!(!text.replace('\n', "").contains(acts), "{text:?}");
        assert!(text.contains("\\u{1b}[2J\\u{9b}31m"), "{text}");
    }
}

#[test]
fn every_size_is_drawn_without_harm() {
    let mut states = [watching(0, 0), watching(3, 100), hostile(), AppState::default()];
    states[1].is_paused = true;
    for state in &mut states {
        for table in Table::ALL {
            state.focus = table;
            for size in (1..24).chain([39, 40, 41, 79, 199]) {
                for height in (1..13).chain([59]) {
                    drawn(state, PLAIN, (size, height));
                }
            }
        }
    }
}

#[test]
fn colours_are_used_only_where_they_may_be() {
    let colours = |is_coloured| {
        let terminal = drawn(&watching(2, 11), Theme { is_coloured }, (120, 30));
        let cells = terminal.backend().buffer().content.clone();
        let mut used: Vec<Color> = cells.iter().flat_map(|cell| [cell.fg, cell.bg]).collect();
        used.retain(|colour| *colour != Color::Reset);
        used.sort_by_key(|colour| format!("{colour:?}"));
        used.dedup();
        used
    };
    assert_eq!(colours(false), []);
    assert_eq!(colours(true), [Color::Cyan, Color::Green, Color::Red, Color::Yellow]);
}

#[test]
fn lines_are_shared_out_and_the_table_in_use_comes_first() {
    assert_eq!(shares(30, [3, 4, 2], 1), [3, 4, 2]);
    assert_eq!(shares(30, [3, 101, 2], 1), [3, 25, 2]);
    assert_eq!(shares(30, [100, 100, 100], 2), [10, 10, 10]);
    assert_eq!(shares(31, [100, 100, 100], 2), [10, 10, 11]);
    assert_eq!(shares(5, [3, 4, 2], 1), [0, 5, 0]);
    for height in 0..80 {
        for focus in 0..3 {
            assert!(shares(height, [9, 40, 17], focus).iter().sum::<u16>() <= height);
        }
    }
}
