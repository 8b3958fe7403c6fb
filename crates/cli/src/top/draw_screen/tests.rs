//! Tests of the rendering, compared as text.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;

use super::{ScreenTheme, distribute_lines, draw_screen};
use crate::top::app_state::tests::{test_process, test_sample, watching_state};
use crate::top::app_state::{AppState, EventLine, RunningProcess, SamplerUpdate, ScreenTable};

const PLAIN: ScreenTheme = ScreenTheme { is_coloured: false };

fn draw_to_test_terminal(
    state: &AppState,
    theme: ScreenTheme,
    size: (u16, u16),
) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    terminal.draw(|frame| draw_screen(state, theme, frame.buffer_mut())).unwrap();
    terminal
}

/// The screen as lines without trailing blanks.
fn screen_text(state: &AppState, size: (u16, u16)) -> String {
    let terminal = draw_to_test_terminal(state, PLAIN, size);
    let buffer = terminal.backend().buffer();
    let row = |y| (0..size.0).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..size.1).map(|y| row(y).trim_end().to_owned() + "\n").collect()
}

fn assert_screen(state: &AppState, size: (u16, u16), expected: &str) {
    let found = screen_text(state, size);
    assert!(found == expected, "found:\n{found}\nexpected:\n{expected}");
}

#[test]
fn screen_of_80_columns() {
    assert_screen(&watching_state(2, 3), (80, 24), include_str!("tests/80x24.txt"));
}

#[test]
fn screen_of_40_columns() {
    assert_screen(&watching_state(2, 3), (40, 10), include_str!("tests/40x10.txt"));
}

#[test]
fn screen_of_200_columns() {
    assert_screen(&watching_state(4, 8), (200, 60), include_str!("tests/200x60.txt"));
}

#[test]
fn screen_without_reactors() {
    assert_screen(&watching_state(0, 0), (80, 12), include_str!("tests/none.txt"));
}

#[test]
fn long_thread_table_scrolls_to_the_selected_row() {
    let mut state = watching_state(2, 100);
    state.chosen.thread = Some(3);
    assert_screen(&state, (80, 24), include_str!("tests/hundred.txt"));
}

#[test]
fn screen_after_process_exit() {
    let mut state = watching_state(1, 1);
    state.apply_update(SamplerUpdate::Exited("the process closed the connection".into()));
    assert_screen(&state, (80, 12), include_str!("tests/gone.txt"));
}

#[test]
fn screen_of_process_selection() {
    let mut state = AppState::default();
    let running = |pid, text: &str| RunningProcess { pid, command_line: text.into() };
    let running = vec![running(17, "tenmil perf"), running(4711, "tenmil perf -t \u{1b}[31m60")];
    state.apply_update(SamplerUpdate::Running(running));
    assert_screen(&state, (60, 8), include_str!("tests/choose.txt"));
}

#[test]
fn help_screen() {
    let mut state = watching_state(1, 1);
    state.is_help = true;
    assert_screen(&state, (100, 22), include_str!("tests/help.txt"));
}

/// State with names that contain terminal control and bidirectional characters.
fn control_character_names() -> AppState {
    const EVIL: &str = "\u{1b}[2J\u{9b}31m\r\n\t\u{7}\u{202e}\u{200b}一二\u{0}";
    let mut state = AppState::default();
    let mut hostile = test_process();
    hostile.version = EVIL.into();
    hostile.command_line = vec![EVIL.into(); 3];
    state.apply_update(SamplerUpdate::Attached(hostile));
    for seconds in 1..3 {
        let mut sample = test_sample(seconds, 2, 3);
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
        state.apply_update(SamplerUpdate::Looked { sample, policy: Some(EVIL.into()) });
    }
    state.apply_update(SamplerUpdate::Happened(EventLine { kind: EVIL.into(), text: EVIL.into() }));
    state
}

#[test]
fn control_characters_in_names_are_escaped() {
    let mut state = control_character_names();
    for stage in 0..3 {
        match stage {
            1 => state.apply_update(SamplerUpdate::Exited("\u{1b}]0;gone\u{7}".into())),
            2 => state.apply_update(SamplerUpdate::Silent("\u{1b}c\u{202e}".into())),
            _ => {}
        }
        let text = screen_text(&state, (200, 40));
        let acts = |c: char| c.is_control() || ['\u{200b}', '\u{202e}'].contains(&c);
        assert!(!text.replace('\n', "").contains(acts), "{text:?}");
        assert!(text.contains("\\u{1b}[2J\\u{9b}31m"), "{text}");
    }
}

#[test]
fn every_terminal_size_is_drawn_without_panic() {
    let mut states = [
        watching_state(0, 0),
        watching_state(3, 100),
        control_character_names(),
        AppState::default(),
    ];
    states[1].is_paused = true;
    for state in &mut states {
        for table in ScreenTable::ALL {
            state.focus = table;
            for size in (1..24).chain([39, 40, 41, 79, 199]) {
                for height in (1..13).chain([59]) {
                    draw_to_test_terminal(state, PLAIN, (size, height));
                }
            }
        }
    }
}

#[test]
fn colors_are_used_only_if_enabled() {
    let colours = |is_coloured| {
        let terminal =
            draw_to_test_terminal(&watching_state(2, 11), ScreenTheme { is_coloured }, (120, 30));
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
fn lines_are_distributed_with_the_focused_table_first() {
    assert_eq!(distribute_lines(30, [3, 4, 2], 1), [3, 4, 2]);
    assert_eq!(distribute_lines(30, [3, 101, 2], 1), [3, 25, 2]);
    assert_eq!(distribute_lines(30, [100, 100, 100], 2), [10, 10, 10]);
    assert_eq!(distribute_lines(31, [100, 100, 100], 2), [10, 10, 11]);
    assert_eq!(distribute_lines(5, [3, 4, 2], 1), [0, 5, 0]);
    for height in 0..80 {
        for focus in 0..3 {
            assert!(distribute_lines(height, [9, 40, 17], focus).iter().sum::<u16>() <= height);
        }
    }
}
