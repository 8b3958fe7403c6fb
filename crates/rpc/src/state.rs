//! State of a process that methods read.

use core::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Code, RpcError};

/// Parts of a running process, one per type, that methods use. A method whose part is missing fails
/// with an error.
///
/// Cheap to clone. Parts are shared with the program's threads, so they are `Sync`; a method must
/// not wait for a lock of the data path.
#[derive(Clone, Debug, Default)]
pub struct ServerState {
    parts: BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

impl ServerState {
    /// Creates a state without parts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part, replacing one of the same type.
    #[must_use]
    pub fn with<T: Any + Send + Sync>(mut self, part: T) -> Self {
        self.parts.insert(TypeId::of::<T>(), Arc::new(part));
        self
    }

    /// Part of type `T`; `what` names it in the error.
    pub fn part<T: Any>(&self, what: &str) -> Result<&T, RpcError> {
        let part = self.parts.get(&TypeId::of::<T>());
        part.and_then(|part| part.downcast_ref()).ok_or_else(|| {
            RpcError::caller(
                Code::NotFound,
                format!("this process has no {what}, expected one that has"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::ServerState;
    use crate::error::Code;

    struct Wheels(u32);

    #[test]
    fn a_part_is_found_by_its_type_and_its_absence_is_told() {
        let state = ServerState::new().with(Wheels(3)).with("a text").with(Wheels(4));
        assert_eq!(state.part::<Wheels>("wheels").unwrap().0, 4);
        assert_eq!(*state.part::<&str>("text").unwrap(), "a text");
        let refusal = state.part::<u8>("brakes").unwrap_err();
        assert_eq!(refusal.code, Code::NotFound);
        assert_eq!(refusal.message, "this process has no brakes, expected one that has");
    }
}
