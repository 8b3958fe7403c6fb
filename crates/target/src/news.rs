//! What those tell whose guests come and go.

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A guest has come: who it is.
    Came(String),
    /// It has left, or was sent away for this reason.
    Left(Option<String>),
    /// Something that somebody may want to look at.
    Trouble(String),
}
