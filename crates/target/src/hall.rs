//! Doors, and the thread that stands at them, whatever is spoken behind.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use base::{Interrupts, Span};
use host::stream::{Address, Door};
use host::watch::{Interest, Ready, Watch};
use host::{EventVectors, Stop, Thread};

/// Who receives those that come in.
pub(crate) trait Keeper: Send + 'static {
    /// Finds a place for somebody who came in by this door.
    fn seat(&mut self, socket: OwnedFd, door: usize) -> Result<(), String>;

    /// Something has happened to what is served.
    fn hear(&mut self) {}

    /// Says what went wrong. If nobody listens, nobody wants to know.
    fn trouble(&self, text: String);
}

/// The thread. Dropping it lets nobody in any more.
#[derive(Debug)]
pub(crate) struct Hall {
    addresses: Vec<Address>,
    wake: EventVectors,
    thread: Option<Thread<()>>,
}

/// How long nobody is let in after that went wrong, which is when descriptors have run out.
const ACCEPT_AGAIN: Span = Span::from_ms(100);
const WAKE: u64 = 0;
const SERVED: u64 = 1;
const FIRST_DOOR: u64 = 2;
const READABLE: Interest = Interest { readable: true, writable: false };

impl Hall {
    /// Stands at `doors`, and hears of what is served when `served` is readable.
    pub(crate) fn open(
        name: &str,
        doors: Vec<Door>,
        served: Option<BorrowedFd<'_>>,
        keeper: impl Keeper,
    ) -> io::Result<Self> {
        let addresses = doors.iter().map(|door| door.address().clone()).collect();
        let wake = EventVectors::new(1)?;
        let watch = Watch::new()?;
        watch.add(wake.descriptor(0).ok_or(io::ErrorKind::InvalidInput)?, WAKE, READABLE)?;
        if let Some(served) = served {
            watch.add(served, SERVED, READABLE)?;
        }
        for (token, door) in (FIRST_DOOR..).zip(&doors) {
            watch.add(door, token, READABLE)?;
        }
        let thread = Thread::spawn(name, None, move |stop| stand(&doors, &watch, keeper, stop))?;
        Ok(Self { addresses, wake, thread: Some(thread) })
    }

    /// Where it stands, with the ports that were picked.
    pub(crate) fn addresses(&self) -> &[Address] {
        &self.addresses
    }
}

impl Drop for Hall {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        thread.stop_flag().stop();
        self.wake.raise(0);
        // Its own drop waits for its end.
        drop(thread);
    }
}

fn stand(doors: &[Door], watch: &Watch, mut keeper: impl Keeper, stop: &Stop) {
    let mut ready: Vec<Ready> = Vec::new();
    while !stop.is_stopped() {
        if let Err(error) = watch.wait(None, &mut ready) {
            // Without its watch it could only spin.
            keeper.trouble(format!("wait for connections: {error}"));
            return;
        }
        for found in &ready {
            match found.token {
                WAKE => {}
                SERVED => keeper.hear(),
                door => let_in(doors, usize::try_from(door - FIRST_DOOR).unwrap_or(0), &mut keeper),
            }
        }
    }
}

/// Lets in who waits at a door.
fn let_in(doors: &[Door], door: usize, keeper: &mut impl Keeper) {
    match doors[door].accept() {
        Ok(None) => {}
        Ok(Some(socket)) => {
            if let Err(text) = keeper.seat(socket, door) {
                keeper.trouble(format!("connect: {text}"));
            }
        }
        Err(error) => {
            keeper.trouble(format!("accept: {error}"));
            host::thread::rest(ACCEPT_AGAIN);
        }
    }
}
