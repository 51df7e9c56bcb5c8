"""Description before anything is planned: the tensors of a module, and the place of each in the whole.

`module_tensors` and `tensor_table` say which tensors a module holds and whether they still are where they
were, `tied_names` which of them are one; `metadata`, `metadata_extraction` and `parallelism` what a rank says about them; `intervals`,
`tensor_layout`, `mesh_layouts` and `layouts` which elements of the whole tensor that is, or, by
`disagreement`, that ranks contradict each other. `checkpoint_views` says all this in a checkpoint's names,
`converted_views` by a conversion into them, `transformers_views` by that of a model of transformers, and
`loader_views` finds it out for an engine by a run of its own loader.

Knows: nothing else.
"""
