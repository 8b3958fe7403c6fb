//! Progress of a running copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use tenmil_base::{Counter, Instant};

use crate::error::RpcError;
use crate::method::{CallContext, Method, MethodKind};
use crate::result_type::{FieldSchema, ResultType};

/// Progress of a copy. Clones refer to the same copy. The copying thread updates it, and any thread
/// may read it at any time without blocking the copy.
#[derive(Clone, Debug)]
pub struct CopyProgress(Arc<CopyProgressState>);

#[derive(Debug)]
struct CopyProgressState {
    source: String,
    target: String,
    size_bytes: u64,
    is_comparing: AtomicBool,
    /// Start time and start offset of the current phase, and the latest update.
    began_ns: Counter,
    began_bytes: Counter,
    now_ns: Counter,
    done_bytes: Counter,
}

const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "copy",
    parameters: &[],
    answer: ResultType::Record(&[
        FieldSchema::new("source", ResultType::Text, "source device"),
        FieldSchema::new("target", ResultType::Text, "target device"),
        FieldSchema::new("phase", ResultType::Text, "`copying` or `comparing`"),
        FieldSchema::new("size_bytes", ResultType::Whole, "size of the source"),
        FieldSchema::new("done_bytes", ResultType::Whole, "bytes processed, including holes"),
        FieldSchema::new("bytes_per_s", WHOLE, "mean rate of this phase, in bytes per second"),
        FieldSchema::new("left_ns", WHOLE, "estimated remaining time at that rate"),
    ]),
    help: "Show the progress of a copy",
    example: "tenmil get copy",
    run: copy_method,
}];

impl CopyProgress {
    /// Creates the progress of a copy that has not started.
    pub fn new(source: &str, target: &str, size_bytes: u64) -> Self {
        Self(Arc::new(CopyProgressState {
            source: source.to_owned(),
            target: target.to_owned(),
            size_bytes,
            is_comparing: AtomicBool::new(false),
            began_ns: Counter::default(),
            began_bytes: Counter::default(),
            now_ns: Counter::default(),
            done_bytes: Counter::default(),
        }))
    }

    /// Starts a phase at `done_bytes`: copying, then comparing. Only the copying thread may call
    /// this and [`update_done_bytes`](Self::update_done_bytes).
    pub fn begin_phase(&self, is_comparing: bool, now: Instant, done_bytes: u64) {
        self.0.is_comparing.store(is_comparing, Ordering::Relaxed);
        self.0.began_ns.set(now.ns);
        self.0.began_bytes.set(done_bytes);
        self.update_done_bytes(now, done_bytes);
    }

    /// Updates the number of bytes processed.
    pub fn update_done_bytes(&self, now: Instant, done_bytes: u64) {
        self.0.now_ns.set(now.ns);
        self.0.done_bytes.set(done_bytes);
    }

    fn progress_row(&self) -> Value {
        let CopyProgressState { source, target, size_bytes, is_comparing, .. } = &*self.0;
        let took_ns = u128::from(self.0.now_ns.get().saturating_sub(self.0.began_ns.get()));
        let done = self.0.done_bytes.get();
        let last_progress = u128::from(done.saturating_sub(self.0.began_bytes.get()));
        let rest = u128::from(size_bytes.saturating_sub(done));
        let per_second = (last_progress * 1_000_000_000).checked_div(took_ns);
        let left_ns = (rest * took_ns).checked_div(last_progress);
        let whole = |value: Option<u128>| value.and_then(|value| u64::try_from(value).ok());
        json!({
            "source": source,
            "target": target,
            "phase": if is_comparing.load(Ordering::Relaxed) { "comparing" } else { "copying" },
            "size_bytes": size_bytes,
            "done_bytes": done,
            "bytes_per_s": whole(per_second),
            "left_ns": whole(left_ns),
        })
    }
}

fn copy_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    Ok(call.state.find_part::<CopyProgress>("running copy")?.progress_row())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_base::{Instant, Span};

    use super::{CopyProgress, METHODS};

    #[test]
    fn rate_and_remaining_time_count_only_bytes_of_this_run() {
        let copying = CopyProgress::new("file:a", "file:b", 1_000);
        assert_eq!(copying.progress_row()["bytes_per_s"], Value::Null, "it has not begun");
        let began = Instant { ns: 7 };
        copying.begin_phase(false, began, 400);
        copying.clone().update_done_bytes(began.after(Span::from_secs(2)), 600);
        let expected = json!({
            "source": "file:a", "target": "file:b", "phase": "copying", "size_bytes": 1_000,
            "done_bytes": 600, "bytes_per_s": 100, "left_ns": 4_000_000_000_u64,
        });
        assert_eq!(copying.progress_row(), expected);
        assert_eq!(METHODS[0].answer.check_value(&copying.progress_row()), Ok(()));

        copying.begin_phase(true, began, 0);
        let row = copying.progress_row();
        assert_eq!((&row["phase"], &row["done_bytes"]), (&json!("comparing"), &json!(0)));
        assert_eq!((&row["bytes_per_s"], &row["left_ns"]), (&Value::Null, &Value::Null));
        assert_eq!(METHODS[0].answer.check_value(&row), Ok(()));
        copying.update_done_bytes(Instant { ns: 8 }, u64::MAX);
        assert_eq!(
            copying.progress_row()["left_ns"],
            0,
            "a source that grows is no reason to panic"
        );
    }
}
