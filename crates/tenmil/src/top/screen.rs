//! The terminal: what is shown on it and what is pressed. It is as it was when this ends, in
//! whatever way: at a key, at a signal, with an error or with a panic.

use std::io;
use std::time::Duration;

use base::Span;
use host::terminal::await_hangup;
use host::{Stop, Thread};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};

use super::draw::{Theme, draw};
use super::link::Link;
use super::state::State;
use crate::Refused;

/// How long a wait for a key lasts; then it is looked whether there is news, or a signal.
const WAIT: Duration = Duration::from_millis(50);

/// How often it is looked whether the terminal has to be watched any more.
const GLANCE: Span = Span::from_ms(50);

/// A terminal of our own. Dropping it gives it back.
struct Screen(DefaultTerminal);

impl Screen {
    /// Also makes a panic, on whatever thread, give the terminal back before it speaks.
    fn take() -> Result<Self, Refused> {
        ratatui::try_init().map(Self).map_err(|error| lost(&error))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // With the terminal gone there is nothing to give back to.
        let _ = ratatui::try_restore();
    }
}

/// Shows what comes over `link` until somebody has seen enough.
pub(crate) fn run(link: &Link, theme: Theme) -> Result<(), Refused> {
    host::signal::catch_interrupts()
        .and_then(|()| host::signal::catch_hangup())
        .map_err(|error| Refused::machine(format!("catch signals: {error}")))?;
    let mut screen = Screen::take()?;
    let _watch = Thread::spawn("hangup", None, watch_for_hangup)
        .map_err(|error| Refused::machine(format!("start a thread: {error}")))?;
    let mut state = State::default();
    let mut is_new = true;
    while !state.is_over && !host::signal::interrupted() {
        while let Some(news) = link.news()? {
            state.take(news);
            is_new = true;
        }
        if std::mem::take(&mut is_new) {
            screen.0.draw(|frame| draw(&state, theme, frame.buffer_mut())).map_err(|e| lost(&e))?;
        }
        is_new = take_keys(&mut state, link).map_err(|error| lost(&error))?;
    }
    Ok(())
}

/// Ends the process when the terminal has gone: whoever waits for keys of one that is gone may wait
/// for ever.
fn watch_for_hangup(stop: &Stop) {
    while !stop.is_stopped() {
        if await_hangup(io::stdin(), GLANCE) {
            let _ = ratatui::try_restore();
            std::process::exit(1);
        }
    }
}

/// Waits a little for keys, and takes all there are. Says whether there was anything.
fn take_keys(state: &mut State, link: &Link) -> io::Result<bool> {
    let mut wait = WAIT;
    let mut is_any = false;
    while event::poll(wait)? {
        match event::read()? {
            Event::Key(key) => {
                if let Some(wish) = state.press(key) {
                    link.wish(wish);
                }
            }
            // The next picture has the new size.
            Event::Resize(..) => {}
            _ => continue,
        }
        (wait, is_any) = (Duration::ZERO, true);
    }
    Ok(is_any)
}

fn lost(error: &io::Error) -> Refused {
    Refused::machine(format!("use the terminal: {error}, expected one to draw on"))
        .with_hint("`tenmil top --once` prints the tables and needs no terminal")
}

#[cfg(test)]
mod tests {
    use super::Screen;

    /// For `a_panic_gives_the_terminal_back`, which runs it on a terminal.
    #[test]
    #[ignore = "it panics, on a terminal"]
    fn a_screen_whose_program_panics() {
        let _screen = Screen::take().unwrap();
        panic!("on purpose");
    }

    #[test]
    fn a_panic_gives_the_terminal_back() {
        let mut seat = crate::top::seat::Seat::new();
        let program = std::env::current_exe().unwrap();
        let this = "top::screen::tests::a_screen_whose_program_panics";
        let mut command = std::process::Command::new(program);
        command.args([this, "--exact", "--ignored", "--nocapture"]);
        let mut program = seat.run(command);
        let (code, shown) = seat.await_end(&mut program);
        assert_ne!(code, Some(0), "{shown}");
        seat.is_as_it_was(&shown);
        let back = shown.find("\u{1b}[?1049l").unwrap();
        let spoken = shown.find("on purpose").unwrap_or_else(|| panic!("{shown}"));
        assert!(back < spoken, "it speaks where it can be read: {shown}");
    }
}
