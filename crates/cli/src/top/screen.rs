//! Terminal input and output. The terminal is restored whenever this module is left: by a key, a
//! signal, an error or a panic.

use std::io;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use tenmil_base::{Error, Span};
use tenmil_linux::pty::await_hangup;
use tenmil_linux::{StopFlag, Thread};

use super::draw::{Theme, draw};
use super::link::SamplerHandle;
use super::state::AppState;

/// Longest wait for a key; updates and signals are checked between two waits.
const WAIT: Duration = Duration::from_millis(50);

/// Interval at which the hangup watch checks whether it should stop.
const GLANCE: Span = Span::from_ms(50);

/// Terminal in raw mode on the alternate screen, restored on drop.
struct Screen(DefaultTerminal);

impl Screen {
    /// Sets up the terminal. A panic on any thread restores it before the panic message.
    fn take() -> Result<Self, Error> {
        ratatui::try_init().map(Self).map_err(|error| lost(&error))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone, there is nothing to restore.
        let _ = ratatui::try_restore();
    }
}

/// Runs the live view over `link` until the user quits.
pub(crate) fn run(link: &SamplerHandle, theme: Theme) -> Result<(), Error> {
    tenmil_linux::signal::catch_interrupts()
        .and_then(|()| tenmil_linux::signal::catch_hangup())
        .map_err(|error| Error::environment(format!("catch signals: {error}")))?;
    let mut screen = Screen::take()?;
    let _watch = Thread::spawn("hangup", None, watch_for_hangup)
        .map_err(|error| Error::environment(format!("start a thread: {error}")))?;
    let mut state = AppState::default();
    let mut is_new = true;
    while !state.is_over && !tenmil_linux::signal::interrupted() {
        while let Some(new_events) = link.next_update()? {
            state.take(new_events);
            is_new = true;
        }
        if std::mem::take(&mut is_new) {
            screen.0.draw(|frame| draw(&state, theme, frame.buffer_mut())).map_err(|e| lost(&e))?;
        }
        is_new = handle_keys(&mut state, link).map_err(|error| lost(&error))?;
    }
    Ok(())
}

/// Exits the process if the terminal is hung up, because a read from it may then block forever.
fn watch_for_hangup(stop: &StopFlag) {
    while !stop.is_stopped() {
        if await_hangup(io::stdin(), GLANCE) {
            let _ = ratatui::try_restore();
            std::process::exit(1);
        }
    }
}

/// Waits briefly for keys, and handles all pending ones. Returns whether there were any.
fn handle_keys(state: &mut AppState, link: &SamplerHandle) -> io::Result<bool> {
    let mut wait = WAIT;
    let mut is_any = false;
    while event::poll(wait)? {
        match event::read()? {
            Event::Key(key) => {
                if let Some(wish) = state.press(key) {
                    link.request(wish);
                }
            }
            // The next frame has the new size.
            Event::Resize(..) => {}
            _ => continue,
        }
        (wait, is_any) = (Duration::ZERO, true);
    }
    Ok(is_any)
}

fn lost(error: &io::Error) -> Error {
    Error::environment(format!("use the terminal: {error}, expected one to draw on"))
        .with_hint("`tenmil top --once` prints the tables and needs no terminal")
}

#[cfg(test)]
mod tests {
    use super::Screen;

    /// Runs in a child process on a pseudo-terminal, started by `a_panic_gives_the_terminal_back`.
    #[test]
    #[ignore = "it panics, on a terminal"]
    fn a_screen_whose_program_panics() {
        let _screen = Screen::take().unwrap();
        panic!("on purpose");
    }

    #[test]
    fn a_panic_gives_the_terminal_back() {
        let mut terminal = crate::top::terminal::Terminal::new();
        let program = std::env::current_exe().unwrap();
        let this = "top::screen::tests::a_screen_whose_program_panics";
        let mut command = std::process::Command::new(program);
        command.args([this, "--exact", "--ignored", "--nocapture"]);
        let mut program = terminal.run(command);
        let (code, shown) = terminal.await_end(&mut program);
        assert_ne!(code, Some(0), "{shown}");
        terminal.is_as_it_was(&shown);
        let back = shown.find("\u{1b}[?1049l").unwrap();
        let spoken = shown.find("on purpose").unwrap_or_else(|| panic!("{shown}"));
        assert!(back < spoken, "it speaks where it can be read: {shown}");
    }
}
