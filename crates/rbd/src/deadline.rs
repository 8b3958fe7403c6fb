//! Calls of librbd that block, with a deadline.

use std::sync::mpsc;
use std::time::Duration;

use tenmil_base::{Error, Span};
use tenmil_linux::NamedThread;

/// The result of `call`, which runs on a thread of its own. `Ok(None)` after `limit`: the thread then continues by
/// itself, and drops the result.
///
/// # Errors
///
/// If no thread can be started.
pub(crate) fn call_with_deadline<T: Send + 'static>(
    limit: Span,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<Option<T>, Error> {
    let (sender, receiver) = mpsc::channel();
    let body = move |_: &tenmil_linux::StopFlag| {
        // Fails if the deadline has passed.
        let _ = sender.send(call());
    };
    let thread = NamedThread::spawn("rbd-call", None, body)
        .map_err(|error| Error::environment(format!("start a thread for librbd: {error}")))?;
    let result = receiver.recv_timeout(Duration::from_nanos(limit.ns)).ok();
    match &result {
        Some(_) => thread.join(),
        // Not joined: it ends when librbd returns.
        None => std::mem::forget(thread),
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tenmil_base::Span;

    use super::call_with_deadline;

    #[test]
    fn call_that_returns_in_time_gives_its_result() {
        assert_eq!(call_with_deadline(Span::from_secs(30), || 7).unwrap(), Some(7));
    }

    #[test]
    fn call_beyond_its_deadline_is_left_behind_and_ends_later() {
        let (release, released) = mpsc::channel::<()>();
        let (ended, has_ended) = mpsc::channel();
        let result = call_with_deadline(Span::from_ms(1), move || {
            let _ = released.recv();
            let _ = ended.send(());
        });
        assert_eq!(result.unwrap(), None);
        release.send(()).unwrap();
        has_ended.recv().unwrap();
    }
}
