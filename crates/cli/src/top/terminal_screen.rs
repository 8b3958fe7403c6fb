//! Terminal input and output. The terminal is restored whenever this module is left: by a key, a
//! signal, an error or a panic.

use std::io;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use tenmil_base::{Error, Span};
use tenmil_linux::pty::await_hangup;
use tenmil_linux::{NamedThread, StopFlag};

use super::app_state::AppState;
use super::draw_screen::{ScreenTheme, draw_screen};
use super::sampling_thread::SamplerHandle;

/// Longest wait for a key; updates and signals are checked between two waits.
const WAIT: Duration = Duration::from_millis(50);

/// Interval at which the hangup watch checks whether it should stop.
const GLANCE: Span = Span::from_ms(50);

/// Terminal in raw mode on the alternate screen, restored on drop.
struct TerminalScreen(DefaultTerminal);

impl TerminalScreen {
    /// Sets up the terminal. A panic on any thread restores it before the panic message.
    fn set_up_terminal() -> Result<Self, Error> {
        ratatui::try_init().map(Self).map_err(|error| terminal_error(&error))
    }
}

impl Drop for TerminalScreen {
    fn drop(&mut self) {
        // If the terminal is gone, there is nothing to restore.
        let _ = ratatui::try_restore();
    }
}

/// Runs the live view over `link` until the user quits.
pub(crate) fn run_screen(link: &SamplerHandle, theme: ScreenTheme) -> Result<(), Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .and_then(|()| tenmil_linux::signal::request_stop_on_sighup())
        .map_err(|error| Error::environment(format!("catch signals: {error}")))?;
    let mut screen = TerminalScreen::set_up_terminal()?;
    let _watch = NamedThread::spawn("hangup", None, exit_on_hangup)
        .map_err(|error| Error::environment(format!("start a thread: {error}")))?;
    let mut state = AppState::default();
    let mut is_new = true;
    while !state.is_over && !tenmil_linux::signal::is_stop_requested() {
        while let Some(new_events) = link.next_update()? {
            state.apply_update(new_events);
            is_new = true;
        }
        if std::mem::take(&mut is_new) {
            screen
                .0
                .draw(|frame| draw_screen(&state, theme, frame.buffer_mut()))
                .map_err(|e| terminal_error(&e))?;
        }
        is_new = handle_keys(&mut state, link).map_err(|error| terminal_error(&error))?;
    }
    Ok(())
}

/// Exits the process if the terminal is hung up, because a read from it may then block forever.
fn exit_on_hangup(stop: &StopFlag) {
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
                if let Some(request) = state.handle_key(key) {
                    link.send_request(request);
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

fn terminal_error(error: &io::Error) -> Error {
    Error::environment(format!("use the terminal: {error}, expected one to draw on"))
        .with_hint("`tenmil top --once` prints the tables and needs no terminal")
}

#[cfg(test)]
mod tests {
    use super::TerminalScreen;

    /// Runs in a child process on a pseudo-terminal, started by `panic_restores_the_terminal`.
    #[test]
    #[ignore = "it panics, on a terminal"]
    fn child_that_panics_with_a_screen() {
        let _screen = TerminalScreen::set_up_terminal().unwrap();
        panic!("on purpose");
    }

    #[test]
    fn panic_restores_the_terminal() {
        let mut terminal = crate::top::terminal::Terminal::new();
        let program = std::env::current_exe().unwrap();
        let this = "top::terminal_screen::tests::child_that_panics_with_a_screen";
        let mut command = std::process::Command::new(program);
        command.args([this, "--exact", "--ignored", "--nocapture"]);
        let mut program = terminal.run(command);
        let (code, shown) = terminal.await_end(&mut program);
        assert_ne!(code, Some(0), "{shown}");
        terminal.assert_restored(&shown);
        let back = shown.find("\u{1b}[?1049l").unwrap();
        let spoken = shown.find("on purpose").unwrap_or_else(|| panic!("{shown}"));
        assert!(back < spoken, "it speaks where it can be read: {shown}");
    }
}
