//! Calls of methods in tests.

use serde_json::Value;

use super::TABLE;
use crate::error::RpcError;
use crate::method::CallContext;
use crate::{Arguments, DeferredReplySlot, PassedFd, ProcessParts};

/// Calls a method and checks its result against the schema of its table row.
pub(crate) fn call_method(
    state: &ProcessParts,
    method: &str,
    parameters: &Value,
) -> Result<Value, RpcError> {
    let method = TABLE.find(method).unwrap();
    let arguments = Arguments::validate(method, parameters.as_object().unwrap())?;
    let answer = (method.run)(&CallContext {
        table: &TABLE,
        state,
        arguments: &arguments,
        later: &DeferredReplySlot::default(),
        passed: &PassedFd::default(),
    })?;
    assert_eq!(method.answer.check_value(&answer), Ok(()));
    Ok(answer)
}
