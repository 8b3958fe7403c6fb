//! Error codes, and the text of the last error of each thread.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tenmil_base::{Error, ErrorCategory};

/// Success.
pub const TENMIL_OK: i32 = 0;
/// The arguments are invalid, or the device does not support the request.
pub const TENMIL_ERROR_USAGE: i32 = -1;
/// The machine is not set up for the request: a file, a permission or memory is missing.
pub const TENMIL_ERROR_ENVIRONMENT: i32 = -2;
/// A controller or a peer failed, or violated its protocol.
pub const TENMIL_ERROR_REMOTE: i32 = -3;
/// The object is in use: by open queues, by I/Os in flight, or by a call of another thread.
pub const TENMIL_ERROR_BUSY: i32 = -4;
/// The handle was never valid, or its object has been closed.
pub const TENMIL_ERROR_HANDLE: i32 = -5;
/// The queue belongs to another thread, or the call interrupts another call of the same queue.
pub const TENMIL_ERROR_THREAD: i32 = -6;
/// A bug of the library. The object of the call is not usable any more.
pub const TENMIL_ERROR_INTERNAL: i32 = -7;

/// Failure of a call: a code and the text for people.
#[derive(Debug)]
pub(crate) struct Failure {
    code: i32,
    text: String,
    hint: Option<String>,
}

/// Texts of the last error of a thread.
#[derive(Default)]
struct LastError {
    text: CString,
    hint: CString,
}

thread_local! {
    static LAST: RefCell<LastError> = RefCell::default();
}

impl Failure {
    pub(crate) fn new(code: i32, text: impl fmt::Display) -> Self {
        Self { code, text: text.to_string(), hint: None }
    }

    pub(crate) fn usage(text: impl fmt::Display) -> Self {
        Self::new(TENMIL_ERROR_USAGE, text)
    }

    pub(crate) fn busy(text: impl fmt::Display) -> Self {
        Self::new(TENMIL_ERROR_BUSY, text)
    }

    pub(crate) fn with_hint(mut self, hint: &str) -> Self {
        self.hint = Some(hint.to_owned());
        self
    }

    /// In a box, so that a result with it is small on the path of an I/O.
    pub(crate) fn boxed(self) -> Box<Self> {
        Box::new(self)
    }

    /// Makes this the last error of the thread, and returns its code.
    fn record(self) -> i32 {
        // A text has no NUL; if one has, it ends there.
        let c_text = |text: String| {
            let bytes: Vec<u8> =
                text.into_bytes().into_iter().take_while(|byte| *byte != 0).collect();
            CString::new(bytes).unwrap_or_default()
        };
        let (text, hint) = (c_text(self.text), c_text(self.hint.unwrap_or_default()));
        // Refused only while the thread ends: then nothing can read it.
        let _ = LAST.try_with(|last| *last.borrow_mut() = LastError { text, hint });
        self.code
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.category {
            ErrorCategory::Usage => TENMIL_ERROR_USAGE,
            ErrorCategory::Environment => TENMIL_ERROR_ENVIRONMENT,
            ErrorCategory::Remote => TENMIL_ERROR_REMOTE,
        };
        Self { code, text: error.text, hint: error.hint }
    }
}

/// Runs the body of a function of the C interface: an error becomes its code and the last error of the
/// thread, and a panic `TENMIL_ERROR_INTERNAL`.
#[inline]
pub(crate) fn run(what: &str, body: impl FnOnce() -> Result<i32, Failure>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => record_cold(failure),
        Err(_) => record_cold(Failure::new(
            TENMIL_ERROR_INTERNAL,
            format_args!("{what}: the library has panicked; its message is on standard error"),
        )),
    }
}

#[cold]
fn record_cold(failure: Failure) -> i32 {
    failure.record()
}

/// Returns one line about the last call of this thread that returned an error: what was being done, to
/// what, what was found and what was expected. Empty if there was none.
///
/// The string belongs to the library. It is valid until a call of this thread returns another error, or
/// the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns a sentence that says how the last error of this thread can be fixed. Empty if that is not known.
///
/// The string belongs to the library, and is valid as long as that of tenmil_last_error().
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_last_hint() -> *const c_char {
    LAST.try_with(|last| last.borrow().hint.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the name of an error code, such as "usage" for TENMIL_ERROR_USAGE. "unknown" for other numbers.
///
/// The string belongs to the library, and is valid until the program ends.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_error_name(code: i32) -> *const c_char {
    name_of(code).as_ptr()
}

const fn name_of(code: i32) -> &'static CStr {
    match code {
        TENMIL_OK => c"ok",
        TENMIL_ERROR_USAGE => c"usage",
        TENMIL_ERROR_ENVIRONMENT => c"environment",
        TENMIL_ERROR_REMOTE => c"remote",
        TENMIL_ERROR_BUSY => c"busy",
        TENMIL_ERROR_HANDLE => c"handle",
        TENMIL_ERROR_THREAD => c"thread",
        TENMIL_ERROR_INTERNAL => c"internal",
        _ => c"unknown",
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use tenmil_base::Error;

    use super::{
        Failure, TENMIL_ERROR_ENVIRONMENT, TENMIL_ERROR_INTERNAL, TENMIL_ERROR_USAGE, run,
        tenmil_last_error, tenmil_last_hint,
    };

    fn last() -> (String, String) {
        // SAFETY: the string is valid until the next error of this thread.
        let text = unsafe { CStr::from_ptr(tenmil_last_error()) };
        // SAFETY: as above.
        let hint = unsafe { CStr::from_ptr(tenmil_last_hint()) };
        (text.to_str().unwrap().to_owned(), hint.to_str().unwrap().to_owned())
    }

    #[test]
    fn error_is_a_code_and_the_text_of_its_thread() {
        let error = Error::environment("open x: no file").with_hint("Create it.");
        assert_eq!(run("open", || Err(error.into())), TENMIL_ERROR_ENVIRONMENT);
        assert_eq!(last(), ("open x: no file".to_owned(), "Create it.".to_owned()));
        assert_eq!(run("other", || Ok(7)), 7);
        assert_eq!(last().0, "open x: no file", "success keeps it");
        let elsewhere = std::thread::scope(|scope| scope.spawn(last).join().unwrap());
        assert_eq!(elsewhere, (String::new(), String::new()));
        assert_eq!(run("cut", || Err(Failure::usage("a\0b"))), TENMIL_ERROR_USAGE);
        assert_eq!(last(), ("a".to_owned(), String::new()));
    }

    #[test]
    fn panic_is_an_error_code() {
        assert_eq!(run("poll", || panic!("expected by this test")), TENMIL_ERROR_INTERNAL);
        assert!(last().0.starts_with("poll: the library has panicked"), "{}", last().0);
    }
}
