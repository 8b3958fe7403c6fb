//! What a program that serves has put together for the methods to answer from.

use core::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::refusal::{Code, Refusal};

/// The parts of a running program that methods are about, each of a type of its own. A part that is
/// not there makes the methods about it refuse, and nothing else.
///
/// Cheap to clone. Parts are shared with the program's own threads, so they are `Sync`; a row's
/// function must not wait for one that is on the data path.
#[derive(Clone, Debug, Default)]
pub struct State {
    parts: BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

impl State {
    /// One without parts.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, with this part, in place of another of its type.
    #[must_use]
    pub fn with<T: Any + Send + Sync>(mut self, part: T) -> Self {
        self.parts.insert(TypeId::of::<T>(), Arc::new(part));
        self
    }

    /// The part of type `T`, which the refusal calls `what`.
    pub fn part<T: Any>(&self, what: &str) -> Result<&T, Refusal> {
        let part = self.parts.get(&TypeId::of::<T>());
        part.and_then(|part| part.downcast_ref()).ok_or_else(|| {
            Refusal::caller(
                Code::Absent,
                format!("this process has no {what}, expected one that has"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::State;
    use crate::refusal::Code;

    struct Wheels(u32);

    #[test]
    fn a_part_is_found_by_its_type_and_its_absence_is_told() {
        let state = State::new().with(Wheels(3)).with("a text").with(Wheels(4));
        assert_eq!(state.part::<Wheels>("wheels").unwrap().0, 4);
        assert_eq!(*state.part::<&str>("text").unwrap(), "a text");
        let refusal = state.part::<u8>("brakes").unwrap_err();
        assert_eq!(refusal.code, Code::Absent);
        assert_eq!(refusal.message, "this process has no brakes, expected one that has");
    }
}
