//! Pseudo-terminal for tests: reads the screen output and writes keystrokes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tenmil_base::Span;

/// Both ends of a pseudo-terminal.
#[derive(Debug)]
pub struct PseudoTerminal {
    /// Master: reads the output and writes keystrokes.
    pub master: OwnedFd,
    /// Slave: input and output of the program under test.
    pub slave: OwnedFd,
}

/// Terminal modes that programs change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalModes {
    input: libc::tcflag_t,
    output: libc::tcflag_t,
    local: libc::tcflag_t,
}

impl PseudoTerminal {
    /// Opens a terminal of this size; both descriptors are close-on-exec.
    ///
    /// # Errors
    ///
    /// If the kernel has no pseudo-terminal left.
    pub fn open(columns: u16, rows: u16) -> io::Result<Self> {
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let mut ends = [-1; 2];
        let [ours, theirs] = &mut ends;
        // SAFETY: both out-pointers are locals that outlive the call; no name and no modes are
        // requested; `size` is only read.
        let result = unsafe {
            libc::openpty(ours, theirs, std::ptr::null_mut(), std::ptr::null(), &raw const size)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened by the kernel and has no other owner.
        let ours = unsafe { OwnedFd::from_raw_fd(ends[0]) };
        // SAFETY: as above.
        let theirs = unsafe { OwnedFd::from_raw_fd(ends[1]) };
        for end in [&ours, &theirs] {
            rustix::io::fcntl_setfd(end, rustix::io::FdFlags::CLOEXEC)?;
        }
        Ok(Self { master: ours, slave: theirs })
    }

    /// Reads the current modes.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn terminal_modes(&self) -> io::Result<TerminalModes> {
        // SAFETY: all zeroes is a valid `termios`.
        let mut modes: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and `modes` is a local that outlives the call.
        if unsafe { libc::tcgetattr(self.master.as_raw_fd(), &raw mut modes) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let libc::termios { c_iflag, c_oflag, c_lflag, .. } = modes;
        Ok(TerminalModes { input: c_iflag, output: c_oflag, local: c_lflag })
    }
}

impl TerminalModes {
    /// Whether input is echoed and line-edited, as in a shell's default.
    pub fn is_cooked(self) -> bool {
        self.local & (libc::ECHO | libc::ICANON) == libc::ECHO | libc::ICANON
    }
}

/// Waits until the slave side is closed; false if it is still open after `at_most`.
pub fn await_hangup(terminal: impl AsFd, at_most: Span) -> bool {
    let limit = Timespec {
        tv_sec: i64::try_from(at_most.ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(at_most.ns % 1_000_000_000).unwrap_or(0),
    };
    // A hang-up is reported without being requested.
    let mut ends = [PollFd::new(&terminal, PollFlags::empty())];
    matches!(poll(&mut ends, Some(&limit)), Ok(1..))
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::{PseudoTerminal, await_hangup};

    #[test]
    fn hangup_of_the_terminal_is_detected() {
        let PseudoTerminal { master: ours, slave: theirs } = PseudoTerminal::open(80, 24).unwrap();
        assert!(!await_hangup(&theirs, Span::from_ms(1)));
        drop(ours);
        assert!(await_hangup(&theirs, Span::from_secs(20)));
    }

    #[test]
    fn typed_input_is_echoed_and_read_by_line() {
        let terminal = PseudoTerminal::open(80, 24).unwrap();
        assert!(terminal.terminal_modes().unwrap().is_cooked());
        rustix::io::write(&terminal.master, b"hello\n").unwrap();
        let mut read = [0; 16];
        let count = rustix::io::read(&terminal.slave, &mut read).unwrap();
        assert_eq!(&read[..count], b"hello\n");
        let count = rustix::io::read(&terminal.master, &mut read).unwrap();
        assert_eq!(&read[..count], b"hello\r\n");
    }
}
