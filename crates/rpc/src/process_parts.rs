//! State of a process that methods read.

use core::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{ErrorCode, RpcError};

/// Parts of a running process, one per type, that methods use. A method whose part is missing fails
/// with an error.
///
/// Cheap to clone. Parts are shared with the program's threads, so they are `Sync`; a method must
/// not wait for a lock of the data path.
#[derive(Clone, Debug, Default)]
pub struct ProcessParts {
    parts: BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

impl ProcessParts {
    /// Creates a state without parts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part, replacing one of the same type.
    #[must_use]
    pub fn with_part<T: Any + Send + Sync>(mut self, part: T) -> Self {
        self.parts.insert(TypeId::of::<T>(), Arc::new(part));
        self
    }

    /// Part of type `T`; `what` names it in the error.
    pub fn find_part<T: Any>(&self, what: &str) -> Result<&T, RpcError> {
        let part = self.parts.get(&TypeId::of::<T>());
        part.and_then(|part| part.downcast_ref()).ok_or_else(|| {
            RpcError::usage(
                ErrorCode::NotFound,
                format!("this process has no {what}, expected one that has"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::ProcessParts;
    use crate::error::ErrorCode;

    struct Wheels(u32);

    #[test]
    fn part_is_found_by_its_type_and_a_missing_one_is_an_error() {
        let state =
            ProcessParts::new().with_part(Wheels(3)).with_part("a text").with_part(Wheels(4));
        assert_eq!(state.find_part::<Wheels>("wheels").unwrap().0, 4);
        assert_eq!(*state.find_part::<&str>("text").unwrap(), "a text");
        let refusal = state.find_part::<u8>("brakes").unwrap_err();
        assert_eq!(refusal.code, ErrorCode::NotFound);
        assert_eq!(refusal.message, "this process has no brakes, expected one that has");
    }
}
