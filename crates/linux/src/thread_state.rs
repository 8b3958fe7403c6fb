//! What another thread of this process is doing: its state, its system call and its stack, as the kernel
//! knows them.
//!
//! ```text
//!   /proc/self/task/TID/stat      state, CPU time
//!                      /wchan     kernel function in which it sleeps
//!                      /stack     kernel stack, for root only
//!                      /syscall   system call, stack pointer and program counter, while it is in one
//!   /proc/self/mem                stack of a thread in a system call: see [`call_stack`]
//! ```
//!
//! The thread is neither stopped nor signaled, so a thread that runs in user space while it is looked at
//! has no known stack pointer and hence no stack here: only its CPU time shows that it runs.

mod call_stack;
mod symbol_table;

use std::fmt;

use tenmil_base::Span;

use crate::kernel_files::KernelFiles;
pub use call_stack::CallFrame;

/// Number of a thread of this process, as the kernel counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OsThreadId(pub u32);

/// State of a thread at one moment. What cannot be read is `None` or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadState {
    /// State as in `ps`: R runs or is runnable, S sleeps, D sleeps uninterruptibly.
    pub state: Option<char>,
    /// CPU time of the thread.
    pub cpu_time: Option<Span>,
    /// System call in which it is.
    pub system_call: Option<SystemCall>,
    /// Kernel function in which it sleeps.
    pub kernel_function: Option<String>,
    /// Kernel stack, innermost first: only if the kernel shows it to this user.
    pub kernel_stack: Vec<String>,
    /// Stack in user space, innermost first: only of a thread in a system call.
    pub user_stack: Vec<CallFrame>,
}

/// System call that a thread executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCall {
    /// Number of the call on this architecture.
    pub number: u32,
    stack_pointer: u64,
    program_counter: u64,
}

/// Unit in which the kernel counts CPU time.
const TICK_NS: u64 = 10_000_000;

impl OsThreadId {
    /// The calling thread.
    pub fn current() -> Self {
        Self(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned())
    }
}

impl ThreadState {
    /// Reads the state of a thread of this process. Reads some files, and for a stack the symbols of the
    /// program: for reports about a thread in trouble only.
    pub fn read(thread: OsThreadId) -> Self {
        let mut state = Self::from_kernel_files(&KernelFiles::live_system(), thread);
        if let Some(call) = state.system_call {
            state.user_stack = call_stack::read_stack(call.stack_pointer, call.program_counter);
        }
        state
    }

    fn from_kernel_files(machine: &KernelFiles, OsThreadId(thread): OsThreadId) -> Self {
        let read = |name: &str| machine.read_trimmed(&format!("proc/self/task/{thread}/{name}"));
        // The name in parentheses may contain anything (proc(5)).
        let stat = read("stat").unwrap_or_default();
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or(Vec::new(), |(_, rest)| rest.split(' ').collect());
        let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok());
        let cpu_ticks = ticks(12).zip(ticks(13)).map(|(user, system)| user + system);
        let kernel_stack = read("stack").unwrap_or_default();
        Self {
            state: fields.get(1).and_then(|text| text.chars().next()),
            cpu_time: cpu_ticks.map(|ticks| Span { ns: ticks * TICK_NS }),
            system_call: read("syscall").and_then(|text| SystemCall::parse(&text)),
            kernel_function: read("wchan").filter(|name| name != "0" && !name.is_empty()),
            kernel_stack: kernel_stack.lines().map(kernel_frame).collect(),
            user_stack: Vec::new(),
        }
    }
}

impl SystemCall {
    /// Parses `NUMBER ARGUMENT×6 SP PC`. `running`, and `-1 SP PC` of a thread that sleeps elsewhere, are
    /// no system call.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let number = words.next()?.parse().ok()?;
        let mut hexadecimal =
            words.map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
        let stack_pointer = hexadecimal.nth(6)??;
        let program_counter = hexadecimal.next()??;
        Some(Self { number, stack_pointer, program_counter })
    }
}

/// `[<0>] do_nanosleep+0x83/0x1a0` without the address.
fn kernel_frame(line: &str) -> String {
    line.rsplit_once("] ").map_or(line, |(_, name)| name).to_owned()
}

impl fmt::Display for ThreadState {
    /// One line: the state, the system call and the stack.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.state {
            Some('R') => out.write_str("it runs or is runnable")?,
            Some('D') => out.write_str("it sleeps uninterruptibly")?,
            Some('S') => out.write_str("it sleeps")?,
            Some(other) => write!(out, "its state is {other}")?,
            None => out.write_str("its state is unknown")?,
        }
        if let Some(time) = self.cpu_time {
            write!(out, ", with {time} of CPU time")?;
        }
        if let Some(call) = self.system_call {
            write!(out, ", in system call {}", call.number)?;
        }
        if let Some(name) = &self.kernel_function {
            write!(out, ", in {name} of the kernel")?;
        }
        if !self.kernel_stack.is_empty() {
            write!(out, "; kernel stack: {}", self.kernel_stack.join(" < "))?;
        }
        if self.user_stack.is_empty() {
            return match self.system_call {
                Some(_) => out.write_str("; its stack cannot be read"),
                None => out.write_str("; its stack is known only while it is in a system call"),
            };
        }
        out.write_str("; stack: ")?;
        for (at, frame) in self.user_stack.iter().enumerate() {
            write!(out, "{}{frame}", if at == 0 { "" } else { " < " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use tenmil_base::Span;

    use super::{OsThreadId, SystemCall, ThreadState, kernel_frame};
    use crate::NamedThread;
    use crate::kernel_files::KernelFiles;

    #[test]
    fn files_of_the_kernel_are_parsed() {
        let root = tempfile::tempdir().unwrap();
        let task = root.path().join("proc/self/task/77");
        std::fs::create_dir_all(&task).unwrap();
        let stat = "77 (a) b) D 1 1 1 0 -1 64 0 0 0 0 150 25 0 0 20 0 3 0 1234 5 6\n";
        std::fs::write(task.join("stat"), stat).unwrap();
        std::fs::write(task.join("wchan"), "io_schedule").unwrap();
        let call = "35 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffc10 0x401000\n";
        std::fs::write(task.join("syscall"), call).unwrap();
        std::fs::write(task.join("stack"), "[<0>] io_schedule+0x1/0x2\n[<0>] read+0x3/0x4\n")
            .unwrap();
        let machine = KernelFiles::under_root(root.path());
        let state = ThreadState::from_kernel_files(&machine, OsThreadId(77));
        assert_eq!((state.state, state.cpu_time), (Some('D'), Some(Span::from_ms(1750))));
        let call = state.system_call.unwrap();
        assert_eq!(
            (call.number, call.stack_pointer, call.program_counter),
            (35, 0x7ffc10, 0x401000)
        );
        assert_eq!(
            state.to_string(),
            "it sleeps uninterruptibly, with 1750 ms of CPU time, in system call 35, in io_schedule of \
             the kernel; kernel stack: io_schedule+0x1/0x2 < read+0x3/0x4; its stack cannot be read"
        );
        let absent = ThreadState::from_kernel_files(&machine, OsThreadId(78));
        assert_eq!(absent, ThreadState::default());
        assert_eq!(SystemCall::parse("running"), None);
        assert_eq!(SystemCall::parse("-1 0x1 0x2"), None);
        assert_eq!(kernel_frame("[<0>] x+0x1/0x2"), "x+0x1/0x2");
    }

    #[inline(never)]
    fn sleep_in_a_named_function(wait: &std::sync::mpsc::Receiver<()>) {
        // Received when the test has looked at the thread.
        let _ = wait.recv();
        std::hint::black_box(());
    }

    #[test]
    fn thread_in_a_system_call_has_a_stack_with_its_functions() {
        let (told, tid) = channel();
        let (wake, wait) = channel();
        let thread = NamedThread::spawn("sleeper", None, move |_| {
            told.send(OsThreadId::current()).unwrap();
            sleep_in_a_named_function(&wait);
        });
        let tid = tid.recv().unwrap();
        let state = (0..2_000)
            .map(|_| {
                crate::named_thread::sleep(Span::from_ms(2));
                ThreadState::read(tid)
            })
            .find(|state| state.system_call.is_some());
        wake.send(()).unwrap();
        thread.unwrap().join();
        // Where the kernel shows no system calls, there is nothing more to see.
        let Some(state) = state else { return };
        let text = state.to_string();
        assert!(text.contains("stack: ") && text.contains(" < "), "{text}");
        assert!(text.contains("sleep_in_a_named_function"), "{text}");
    }
}
