//! The terminal: what is shown on it and what is pressed. It is as it was when this ends, in
//! whatever way: at a key, at a signal, with an error or with a panic.

use std::io;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};

use super::draw::{Theme, draw};
use super::link::Link;
use super::state::State;
use crate::Refused;

/// How long a wait for a key lasts; then it is looked whether there is news, or a signal.
const WAIT: Duration = Duration::from_millis(50);

/// A terminal of our own. Dropping it gives it back.
struct Screen(DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        // With the terminal gone there is nothing to give back to.
        let _ = ratatui::try_restore();
    }
}

/// Shows what comes over `link` until somebody has seen enough.
pub(crate) fn run(link: &Link, theme: Theme) -> Result<(), Refused> {
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch signals: {error}")))?;
    // This also makes a panic give the terminal back before it speaks.
    let mut screen = Screen(ratatui::try_init().map_err(|error| lost(&error))?);
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
