//! A terminal that is a program: what is written to it is read here, and keys are written here.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use base::Span;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Both ends of a pseudo-terminal.
#[derive(Debug)]
pub struct Terminal {
    /// The screen and the keyboard: reads what is shown, and takes what is typed.
    pub ours: OwnedFd,
    /// What a program gets as its input and output.
    pub theirs: OwnedFd,
}

/// How a terminal treats what is typed and shown, as far as programs change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    input: libc::tcflag_t,
    output: libc::tcflag_t,
    local: libc::tcflag_t,
}

impl Terminal {
    /// A new one of this size, whose ends this process does not pass on to others by itself.
    ///
    /// # Errors
    ///
    /// If the kernel has none left.
    pub fn open(columns: u16, rows: u16) -> io::Result<Self> {
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let mut ends = [-1; 2];
        let [ours, theirs] = &mut ends;
        // SAFETY: both places are ours and live through the call; no name and no modes are asked
        // for; `size` is only read.
        let result = unsafe {
            libc::openpty(ours, theirs, std::ptr::null_mut(), std::ptr::null(), &raw const size)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it, and nobody else knows its number.
        let ours = unsafe { OwnedFd::from_raw_fd(ends[0]) };
        // SAFETY: the same.
        let theirs = unsafe { OwnedFd::from_raw_fd(ends[1]) };
        for end in [&ours, &theirs] {
            rustix::io::fcntl_setfd(end, rustix::io::FdFlags::CLOEXEC)?;
        }
        Ok(Self { ours, theirs })
    }

    /// How it behaves now.
    ///
    /// # Errors
    ///
    /// If the kernel does not say.
    pub fn modes(&self) -> io::Result<Modes> {
        // SAFETY: all zeroes is a valid `termios`.
        let mut modes: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and `modes` is ours and lives through the call.
        if unsafe { libc::tcgetattr(self.ours.as_raw_fd(), &raw mut modes) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let libc::termios { c_iflag, c_oflag, c_lflag, .. } = modes;
        Ok(Modes { input: c_iflag, output: c_oflag, local: c_lflag })
    }
}

impl Modes {
    /// Whether what is typed is shown, and can be edited until the end of the line: as shells leave
    /// it.
    pub fn is_cooked(self) -> bool {
        self.local & (libc::ECHO | libc::ICANON) == libc::ECHO | libc::ICANON
    }
}

/// Waits until the other side of `terminal` is gone; false if it is still there after `at_most`.
pub fn await_hangup(terminal: impl AsFd, at_most: Span) -> bool {
    let limit = Timespec {
        tv_sec: i64::try_from(at_most.ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(at_most.ns % 1_000_000_000).unwrap_or(0),
    };
    // That it is gone is told without being asked for.
    let mut ends = [PollFd::new(&terminal, PollFlags::empty())];
    matches!(poll(&mut ends, Some(&limit)), Ok(1..))
}

#[cfg(test)]
mod tests {
    use base::Span;

    use super::{Terminal, await_hangup};

    #[test]
    fn who_sits_before_a_terminal_may_go() {
        let Terminal { ours, theirs } = Terminal::open(80, 24).unwrap();
        assert!(!await_hangup(&theirs, Span::from_ms(1)));
        drop(ours);
        assert!(await_hangup(&theirs, Span::from_secs(20)));
    }

    #[test]
    fn what_is_typed_is_shown_and_read_by_the_line() {
        let terminal = Terminal::open(80, 24).unwrap();
        assert!(terminal.modes().unwrap().is_cooked());
        rustix::io::write(&terminal.ours, b"hello\n").unwrap();
        let mut read = [0; 16];
        let count = rustix::io::read(&terminal.theirs, &mut read).unwrap();
        assert_eq!(&read[..count], b"hello\n");
        let count = rustix::io::read(&terminal.ours, &mut read).unwrap();
        assert_eq!(&read[..count], b"hello\r\n");
    }
}
