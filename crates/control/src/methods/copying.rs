//! A copy under way: from where to where, and how far it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Count, Instant};
use serde_json::{Value, json};

use crate::method::{Call, Method, Verb};
use crate::refusal::Refusal;
use crate::shape::{Field, Shape};

/// How far a copy is. Clones are of the same copy: who copies says, and whoever wants to know asks,
/// at any time and without holding it up.
#[derive(Clone, Debug)]
pub struct Copying(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    source: String,
    target: String,
    size_bytes: u64,
    is_comparing: AtomicBool,
    /// When this phase began and with how much, and how much it is now.
    began_ns: Count,
    began_bytes: Count,
    now_ns: Count,
    done_bytes: Count,
}

const WHOLE: Shape = Shape::Maybe(&Shape::Whole);

pub(super) const METHODS: &[Method] = &[Method {
    verb: Verb::Get,
    name: "copy",
    parameters: &[],
    answer: Shape::Record(&[
        Field::new("source", Shape::Text, "what is read"),
        Field::new("target", Shape::Text, "what is written"),
        Field::new("phase", Shape::Text, "copying or comparing"),
        Field::new("size_bytes", Shape::Whole, "how much there is"),
        Field::new("done_bytes", Shape::Whole, "how much of it has been dealt with, holes too"),
        Field::new("bytes_per_s", WHOLE, "how much a second since this phase began here"),
        Field::new("left_ns", WHOLE, "how long the rest takes at that rate"),
    ]),
    help: "Tell how far a copy is",
    example: "tenmil get copy",
    run: copy,
}];

impl Copying {
    /// A copy of so many bytes that has not begun.
    pub fn new(source: &str, target: &str, size_bytes: u64) -> Self {
        Self(Arc::new(Shared {
            source: source.to_owned(),
            target: target.to_owned(),
            size_bytes,
            is_comparing: AtomicBool::new(false),
            began_ns: Count::default(),
            began_bytes: Count::default(),
            now_ns: Count::default(),
            done_bytes: Count::default(),
        }))
    }

    /// A phase begins at `done_bytes`: the copying, or after that the comparing. As
    /// [`reach`](Self::reach), to be called by the one who copies.
    pub fn begin(&self, is_comparing: bool, now: Instant, done_bytes: u64) {
        self.0.is_comparing.store(is_comparing, Ordering::Relaxed);
        self.0.began_ns.set(now.ns);
        self.0.began_bytes.set(done_bytes);
        self.reach(now, done_bytes);
    }

    /// So much has been dealt with.
    pub fn reach(&self, now: Instant, done_bytes: u64) {
        self.0.now_ns.set(now.ns);
        self.0.done_bytes.set(done_bytes);
    }

    fn row(&self) -> Value {
        let Shared { source, target, size_bytes, is_comparing, .. } = &*self.0;
        let took_ns = u128::from(self.0.now_ns.get().saturating_sub(self.0.began_ns.get()));
        let done = self.0.done_bytes.get();
        let moved = u128::from(done.saturating_sub(self.0.began_bytes.get()));
        let rest = u128::from(size_bytes.saturating_sub(done));
        let per_second = (moved * 1_000_000_000).checked_div(took_ns);
        let left_ns = (rest * took_ns).checked_div(moved);
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

fn copy(call: &Call<'_>) -> Result<Value, Refusal> {
    Ok(call.state.part::<Copying>("copy under way")?.row())
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};
    use serde_json::{Value, json};

    use super::{Copying, METHODS};

    #[test]
    fn how_fast_and_how_long_yet_is_told_of_what_was_done_here() {
        let copying = Copying::new("file:a", "file:b", 1_000);
        assert_eq!(copying.row()["bytes_per_s"], Value::Null, "it has not begun");
        let began = Instant { ns: 7 };
        copying.begin(false, began, 400);
        copying.clone().reach(began.after(Span::from_secs(2)), 600);
        let expected = json!({
            "source": "file:a", "target": "file:b", "phase": "copying", "size_bytes": 1_000,
            "done_bytes": 600, "bytes_per_s": 100, "left_ns": 4_000_000_000_u64,
        });
        assert_eq!(copying.row(), expected);
        assert_eq!(METHODS[0].answer.check(&copying.row()), Ok(()));

        copying.begin(true, began, 0);
        let row = copying.row();
        assert_eq!((&row["phase"], &row["done_bytes"]), (&json!("comparing"), &json!(0)));
        assert_eq!((&row["bytes_per_s"], &row["left_ns"]), (&Value::Null, &Value::Null));
        assert_eq!(METHODS[0].answer.check(&row), Ok(()));
        copying.reach(Instant { ns: 8 }, u64::MAX);
        assert_eq!(copying.row()["left_ns"], 0, "a source that grows is no reason to panic");
    }
}
