//! Terminal for programs that draw: it types keys and records the screen.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use tenmil_base::Span;
use tenmil_linux::pty::{PseudoTerminal, TerminalModes};
use tenmil_linux::{Clock, NamedThread};

pub(crate) struct Terminal {
    terminal: Option<PseudoTerminal>,
    before: TerminalModes,
    shown: Arc<Mutex<Vec<u8>>>,
    reader: Option<NamedThread<()>>,
}

/// Longer than anything takes on the busiest machine.
const TIME_LIMIT: Span = Span::from_secs(30);

/// What terminals are told to show another screen, and to go back to the first.
const OTHER_SCREEN: &str = "\u{1b}[?1049h";
const FIRST_SCREEN: &str = "\u{1b}[?1049l";

impl Terminal {
    pub(crate) fn new() -> Self {
        let terminal = PseudoTerminal::open(100, 30).unwrap();
        let before = terminal.terminal_modes().unwrap();
        assert!(before.is_cooked());
        Self { terminal: Some(terminal), before, shown: Arc::default(), reader: None }
    }

    /// Starts a program here, and reads what it shows.
    pub(crate) fn run(&mut self, command: Command) -> Child {
        let child = self.start_without_reading(command);
        let mut screen = File::from(self.terminal().master.try_clone().unwrap());
        let shown = Arc::clone(&self.shown);
        let read = move |_: &tenmil_linux::StopFlag| {
            let mut bytes = [0; 4096];
            // An error is the end: the other side is closed.
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                shown.lock().unwrap().extend(&bytes[..count]);
            }
        };
        self.reader = Some(NamedThread::spawn("reads", None, read).unwrap());
        child
    }

    /// Starts a program here, and looks away.
    pub(crate) fn start_without_reading(&self, mut command: Command) -> Child {
        let theirs = || Stdio::from(self.terminal().slave.try_clone().unwrap());
        command.env("TERM", "xterm-256color").stdin(theirs()).stdout(theirs()).stderr(theirs());
        command.spawn().unwrap()
    }

    pub(crate) fn send_keys(&self, keys: &str) {
        let keyboard = self.terminal().master.try_clone().unwrap();
        File::from(keyboard).write_all(keys.as_bytes()).unwrap();
    }

    /// Takes the terminal away.
    pub(crate) fn close(mut self) {
        self.terminal = None;
    }

    /// Waits until the program has the terminal to itself.
    pub(crate) fn await_raw(&self) {
        wait_until("it takes the terminal", || {
            !self.terminal().terminal_modes().unwrap().is_cooked()
        });
    }

    pub(crate) fn await_shown(&self, text: &str) {
        wait_until(text, || self.shown().contains(text));
    }

    /// Waits for the end. Returns the exit code and all that was shown.
    pub(crate) fn await_end(&self, child: &mut Child) -> (Option<i32>, String) {
        let code = await_exit(child);
        self.await_shown(FIRST_SCREEN);
        (code, self.shown())
    }

    /// The terminal does what it did before, and shows what it showed.
    pub(crate) fn assert_restored(&self, shown: &str) {
        assert_eq!(self.terminal().terminal_modes().unwrap(), self.before, "{shown}");
        let last = |text| shown.rfind(text);
        assert!(last(OTHER_SCREEN).is_some() && last(OTHER_SCREEN) < last(FIRST_SCREEN), "{shown}");
        assert!(last("\u{1b}[?25l") <= last("\u{1b}[?25h"), "the cursor is to be seen: {shown}");
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    fn terminal(&self) -> &PseudoTerminal {
        self.terminal.as_ref().unwrap()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // With this the other side is gone, if the program has ended, and so is the reader.
        self.terminal = None;
        let reader = self.reader.take();
        if std::thread::panicking() {
            // The program may be there still, and the reader with it.
            std::mem::forget(reader);
        }
    }
}

/// Waits for a program's exit code; none if a signal has ended it.
pub(crate) fn await_exit(child: &mut Child) -> Option<i32> {
    let mut status = None;
    let clock = Clock::on_kernel_clock();
    let end = clock.now().after(TIME_LIMIT);
    while status.is_none() {
        if clock.now() > end {
            child.kill().unwrap();
            panic!("it never ends");
        }
        status = child.try_wait().unwrap();
        tenmil_linux::named_thread::yield_cpu();
    }
    status.unwrap().code()
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let clock = Clock::on_kernel_clock();
    let end = clock.now().after(TIME_LIMIT);
    while !is_so() {
        assert!(clock.now() < end, "never: {what:?}");
        tenmil_linux::named_thread::yield_cpu();
    }
}
